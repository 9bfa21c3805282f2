"""groups= as values: what is accepted, and which places it gives."""

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.gradients.manual_buckets import VariableGroups


def variables(count):
    return [tf.Variable([0.0], name=f"v{i}") for i in range(count)]


@pytest.mark.parametrize("groups", [True, 1.5, "two", [3], [[3]], ["ab"], {"a": []}])
def test_what_is_neither_a_number_nor_lists_of_variables_is_refused(groups):
    with pytest.raises(TypeError, match="a list of lists"):
        tfdist.DistributedGradientTape(groups=groups)


@pytest.mark.parametrize("count", [0, -1])
def test_there_is_at_least_one_group(count):
    with pytest.raises(ValueError, match="at least 1"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), groups=count)


def test_a_variable_named_twice_is_refused():
    a, b = variables(2)
    for groups in ([[a, a]], [[a, b], [b]]):
        with pytest.raises(ValueError, match="in groups twice"):
            tfdist.DistributedGradientTape(groups=groups)
    layer = keras.layers.Dense(1)
    made = VariableGroups([[layer], [layer]])  # no variables yet
    layer.build((None, 2))
    with pytest.raises(ValueError, match="in groups twice"):
        made.places(layer.trainable_variables, [8, 4])


def test_a_variable_without_gradient_in_the_call_is_refused():
    tfdist.init()
    a, b = variables(2)
    with pytest.raises(ValueError, match="Group 1 .*v1:0, which is not among"):
        VariableGroups([[a], [b]]).places([a], [4])
    with tfdist.DistributedGradientTape(groups=[[b]]) as tape:
        loss = a * 2.0
    with pytest.raises(ValueError, match="not among the variables"):
        tape.gradient(loss, [a])


def test_places_leave_out_what_is_not_reduced_and_layers_stand_for_their_variables():
    first, second = keras.layers.Dense(1), keras.layers.Dense(1, use_bias=False)
    for layer in (first, second):
        layer.build((None, 2))
    listed = [*first.trainable_variables, second.kernel]
    groups = VariableGroups([[second, first.kernel], [first.bias]])
    assert groups.places(listed, [8, 4, 8]) == [[2, 0], [1]]
    assert groups.places(listed, [8, None, 8]) == [[2, 0]]
    assert groups.describe(listed) == "0,1,0"
    first.trainable = False
    assert VariableGroups([[first], [second]]).places([second.kernel], [8]) == [[0]]
    assert VariableGroups(2).places(listed, [None, 4, 8]) == [[2], [1]]
