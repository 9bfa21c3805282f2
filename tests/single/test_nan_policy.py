"""What counts as a gradient that is not finite."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.gradients.nan_policy import all_finite

NAN, INF = float("nan"), float("inf")
FINITE = {
    "none": [],
    "float": [[1.0, -2.0], np.zeros((0, 3), "float32")],
    "integers, which have neither": [[1, 2]],
    "bool": [[True]],
    "complex": [[1 + 2j]],
}
NOT_FINITE = {
    "the last": [[1.0], [0.0, NAN]],
    "the first": [[NAN], [1.0]],
    "infinite": [[-INF]],
    "float16": [np.array([65504.0, INF], "float16")],
    "imaginary": [[complex(1.0, NAN)]],
    "real": [[complex(INF, 1.0)]],
}


def as_rows(values):
    dims = tf.constant([9, *values.shape[1:]], tf.int64)
    return tf.IndexedSlices(values, tf.range(len(values)), dims)


@pytest.mark.parametrize("form", [tf.identity, as_rows])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", [*FINITE, *NOT_FINITE])
def test_one_value_that_is_not_finite_is_enough(name, in_graph, form):
    grads = [form(tf.constant(one)) for one in {**FINITE, **NOT_FINITE}[name]]
    found = (tf.function(all_finite) if in_graph else all_finite)(grads)
    assert found.dtype == tf.bool and found.shape == ()
    assert bool(found) == (name in FINITE)
