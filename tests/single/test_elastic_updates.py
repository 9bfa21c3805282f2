"""Updates out of place: the bits of updates in place, and nothing is copied first."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.elastic.updates import update_out_of_place


class AddsASum(keras.optimizers.SGD):
    """Updates by a sum, whose terms Grappler adds to a variable one by one."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(variable, 0.1 * tf.sin(gradient) - learning_rate * gradient)
        self.assign_add(variable, 0.1 * tf.sin(gradient) + 0.3 * gradient)
        self.assign_sub(variable, -(0.1 * tf.cos(gradient) + 0.7 * gradient))


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.1, momentum=0.5)
    ),
    "sums": lambda: AddsASum(0.1),
}
IN_PLACE = {"AssignAddVariableOp", "AssignSubVariableOp"}


def trained(optimizer, dtype="float32"):
    """The variables after four steps, and the names of the ops that add to weights."""
    rng = np.random.default_rng(3)
    weights = [tf.Variable(tf.cast(rng.normal(size=(5, 4)), dtype)) for _ in range(2)]
    optimizer.build(weights)
    kept = []

    @tf.function
    def step(factors):
        grads = [tf.cast(factors, dtype) * tf.sin(w) for w in weights]
        optimizer.apply(grads, weights)

    for _ in range(4):
        step(rng.normal(size=(5, 4)))
        kept.append([w.read_value() for w in weights])  # as a snapshot does
    graph = step.get_concrete_function(tf.TensorSpec([5, 4], tf.float64)).graph
    found = set()
    for one in [graph, *graph._functions.values()]:
        nodes = getattr(one, "graph", one).get_operations()
        found |= {op.type for op in nodes if len(op.inputs) > 1 and op.inputs[1].shape}
    values = [*weights, *optimizer.variables]
    return [v.numpy() for v in values], found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_updates_in_place(name):
    expected, in_place = trained(OPTIMIZERS[name]())
    optimizer = OPTIMIZERS[name]()
    update_out_of_place([optimizer])
    found, out_of_place = trained(optimizer)
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert in_place & IN_PLACE and not out_of_place & IN_PLACE


def test_half_precision_has_the_same_bits():
    expected, _ = trained(OPTIMIZERS["SGD"](), "bfloat16")
    optimizer = OPTIMIZERS["SGD"]()
    update_out_of_place([optimizer])
    found, _ = trained(optimizer, "bfloat16")
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_optimizer_of_a_model_and_updates_by_rows():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(6, 2)])
    model.compile(keras.optimizers.SGD(0.5))
    update_out_of_place([model, tf.Variable(1.0)])
    table = model.layers[0].embeddings
    before = table.numpy()
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 4]), [6, 2])
    model.optimizer.apply([rows], [table])
    expected = before.copy()
    expected[[1, 4]] -= 0.5
    np.testing.assert_array_equal(table.numpy(), expected)


def test_a_model_without_an_optimizer_and_updates_of_a_class_stay():
    class Counting(keras.optimizers.SGD):
        def assign_add(self, variable, value):
            super().assign_add(variable, value)

    optimizer, other = Counting(), keras.optimizers.SGD()
    other.assign_add = own = lambda variable, value: None
    update_out_of_place([keras.Sequential([keras.Input((1,))]), optimizer, other])
    assert "assign_add" not in vars(optimizer)
    assert other.assign_add is own
