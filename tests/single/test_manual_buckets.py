"""Buckets that the user chooses: what is accepted, and which places they give."""

import keras
import pytest
import tensorflow as tf

from tfdist.gradients.manual_buckets import ManualBuckets


def variables(count):
    return [tf.Variable([0.0], name=f"v{i}") for i in range(count)]


@pytest.mark.parametrize("groups", [True, 0, -1, 1.5, "two", {"a": []}])
def test_what_is_neither_a_number_nor_a_list_is_refused(groups):
    with pytest.raises(ValueError, match="a number > 0 or a list of lists"):
        ManualBuckets(groups)


@pytest.mark.parametrize("groups", [[3], [[3]], ["ab"]])
def test_lists_of_something_else_than_variables_are_refused(groups):
    with pytest.raises(TypeError, match="lists of variables"):
        ManualBuckets(groups)


def test_a_variable_named_twice_is_in_the_first_bucket_and_unknown_ones_in_none():
    a, b, other = variables(3)
    assert ManualBuckets([[a, b], [b]]).places([a, b], [4, 4]) == [[1, 0]]
    assert ManualBuckets([[a], [other]]).places([a], [4]) == [[0]]


def test_places_leave_out_what_is_not_reduced_and_layers_stand_for_their_variables():
    first, second = keras.layers.Dense(1), keras.layers.Dense(1, use_bias=False)
    for layer in (first, second):
        layer.build((None, 2))
    listed = [*first.trainable_variables, second.kernel]
    groups = ManualBuckets([[second, first.kernel], [first.bias]])
    assert groups.places(listed, [8, 4, 8]) == [[2, 0], [1]]
    assert groups.places(listed, [8, None, 8]) == [[2, 0]]
    assert groups.describe(listed) == "0,1,0"
    first.trainable = False
    assert ManualBuckets([[first], [second]]).places([second.kernel], [8]) == [[0]]
    assert ManualBuckets(2).places(listed, [None, 4, 8]) == [[2], [1]]
