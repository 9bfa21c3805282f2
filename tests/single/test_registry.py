"""Values that are kept for objects of others, by weak reference."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.core.registry import WeakRegistry


def graph():
    with tf.Graph().as_default() as made:
        return made


def function_graph():
    return tf.function(lambda: tf.constant(1)).get_concrete_function().graph


MAKERS = {
    "graph": graph,
    "function graph": function_graph,
    "dataset": lambda: tf.data.Dataset.range(3),
    "tf.Variable": lambda: tf.Variable([1.0, 2.0]),
    "keras.Variable": lambda: keras.Variable(np.ones(3, "float32")),
    "optimizer": lambda: keras.optimizers.SGD(),
    "model": lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_entry_lives_as_long_as_its_object(kind):
    registry = WeakRegistry()
    one, other = MAKERS[kind](), MAKERS[kind]()
    registry.set(one, "a")
    registry.set(one, "b")
    assert registry.get(one) == "b" and registry.get(other) is None
    assert one in registry and other not in registry and len(registry) == 1
    del one
    gc.collect()
    assert len(registry) == 0
    assert registry.get(other, "none") == "none"


def test_an_object_at_the_place_of_another_has_no_value_of_it():
    registry = WeakRegistry()

    class Thing:
        pass

    for _ in range(100):  # most of them at the same address
        thing = Thing()
        assert thing not in registry
        registry.set(thing, 1)
    del thing
    assert len(registry) == 0
