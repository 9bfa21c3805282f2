"""local_variables= at size 1: what is accepted and refused."""

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import per_rank_variables
from tfdist.collectives.local_variables import LocalVariables
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.reduction import reduce_gradients


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


@pytest.mark.parametrize(
    "chosen",
    [
        "kernel",
        3,
        ["kernel"],
        [tf.constant(1.0)],
        tf.Variable(1.0),
        keras.layers.Dense(2),
        keras.Sequential(),
    ],
)
def test_what_is_neither_a_list_of_variables_and_layers_nor_a_function_is_refused(
    chosen,
):
    with pytest.raises(TypeError, match="variables and layers"):
        tfdist.DistributedGradientTape(local_variables=chosen)


def test_a_keras_variable_and_what_it_holds_are_one():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert LocalVariables([layer.kernel]).places([layer.kernel.value]) == [0]
    assert LocalVariables([layer.kernel.value]).places([layer.kernel]) == [0]
    model = keras.Sequential([layer, keras.layers.Dense(1)])
    model.build((None, 3))
    assert LocalVariables([layer]).places(model.trainable_variables) == [0, 1]
    assert LocalVariables([model]).places(model.trainable_variables) == [0, 1, 2, 3]
    assert LocalVariables([]).places(model.trainable_variables) == []


def test_what_would_make_the_shared_variables_differ_is_refused():
    v = tf.Variable(1.0)
    for options in ({}, {"gradient_accumulation_steps": 2}):
        inner = keras.optimizers.SGD(0.1, global_clipnorm=1.0, **options)
        for optimizer in (inner, keras.optimizers.LossScaleOptimizer(inner)):
            with pytest.raises(ValueError, match="global_clipnorm"):
                tfdist.DistributedOptimizer(optimizer, local_variables=[v])
    several = keras.optimizers.MultiOptimizer(
        lambda variable: keras.optimizers.SGD(0.1, global_clipnorm=1.0)
    )
    optimizer = tfdist.DistributedOptimizer(several, local_variables=[v])
    with pytest.raises(ValueError, match="global_clipnorm"):
        optimizer.apply([tf.constant(1.0)], [v])


def test_scaling_without_local_variables_and_a_weight_without_scaling_are_refused():
    v = tf.Variable([1.0])
    with pytest.raises(ValueError, match="without local_variables"):
        ReduceOptions(scale_local_gradients=False)
    local = LocalVariables([v])
    with pytest.raises(ValueError, match="True or False"):
        ReduceOptions(local_variables=local, scale_local_gradients=2)
    options = ReduceOptions(local_variables=local, scale_local_gradients=False)
    with pytest.raises(ValueError, match="Omit weight or"):
        reduce_gradients([tf.constant([2.0])], [v], options, weight=3)


def test_a_local_variable_of_another_model_hides_no_slots_of_that_name():
    earlier = keras.Variable(1.0, name="head")
    per_rank_variables.declare([earlier])
    shared, own = keras.Variable(1.0, name="head"), keras.Variable(1.0, name="own")
    slots = [keras.Variable(0.0, name=f"{n}_momentum") for n in ("head", "own")]
    per_rank_variables.declare([own])
    per_rank_variables.note_broadcast([shared, *slots])
    # `own` was not broadcast, but is trained in the step that is compared.
    found = per_rank_variables.broadcast_with([shared, own])
    assert [v.name for v in found] == ["head", "head_momentum"]
