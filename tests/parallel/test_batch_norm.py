"""Synchronised batch normalisation on several ranks against Keras's layer on one.

Float64. The rank's loss is the sum over its own samples, divided by the number of all
ranks' samples, so the ranks' gradients add up to those of one process with the
concatenated batch.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import in_float64
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp

BATCHES = {2: (5, 11), 3: (5, 11, 16)}
PLAIN = keras.layers.BatchNormalization


def samples(batches, shape=(6,)):
    """Inputs and targets of every rank, far from mean 0."""
    rng = np.random.default_rng([len(batches), *shape])
    x = 3.0 + rng.normal(size=(sum(batches), *shape)) * rng.uniform(0.1, 9, shape[-1:])
    ends = np.cumsum(batches)[:-1]
    return np.split(x, ends), np.split(rng.normal(size=(sum(batches), 2)), ends)


class Shared(keras.layers.Layer):
    """One batch normalisation that is called twice in a step, on different values."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def call(self, x, training=False):
        return self.norm(x, training=training) * self.norm(x**2, training=training)


def dense(norm):
    inputs = keras.Input((6,))
    y = norm()(keras.layers.Dense(4, use_bias=False)(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.ops.tanh(y)))


def branches(norm):
    """Several in one graph, some of which may run in any order, one of them shared."""
    inputs = keras.Input((6,))
    parts = [norm()(keras.layers.Dense(4)(inputs)) for _ in range(3)]
    y = norm(momentum=0.8)(keras.ops.tanh(keras.layers.concatenate(parts)))
    y = Shared(norm(scale=False))(y)
    return keras.Model(inputs, keras.layers.Dense(2)(y))


def convolution(norm):
    inputs = keras.Input((5, 4, 3))
    y = keras.layers.Permute((3, 1, 2))(keras.layers.Conv2D(4, 2)(inputs))
    y = norm(axis=1, epsilon=1e-2)(y)
    y = norm(center=False)(y)
    y = keras.layers.GlobalAveragePooling2D()(keras.ops.tanh(y))
    return keras.Model(inputs, keras.layers.Dense(2)(y))


def sequence(norm):
    """With a mask: steps of zeros do not count."""
    inputs = keras.Input((7, 3))
    y = keras.layers.Masking()(inputs)
    y = norm()(keras.layers.Dense(4)(y))
    y = keras.layers.GlobalAveragePooling1D()(keras.ops.tanh(y))
    return keras.Model(inputs, keras.layers.Dense(2)(y))


def renormalised(norm):
    inputs = keras.Input((6,))
    y = keras.layers.Dense(4, activation="tanh")(inputs)
    y = norm(renorm=True, renorm_clipping={"rmax": 1.5, "dmax": 2.0})(y)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.ops.tanh(y)))


MODELS = {
    "dense": (dense, (6,)),
    "branches": (branches, (6,)),
    "convolution": (convolution, (5, 4, 3)),
    "sequence": (sequence, (7, 3)),
    "renormalised": (renormalised, (6,)),
}


def data_of(name, batches):
    xs, ys = samples(batches, MODELS[name][1])
    if name == "sequence":
        for number, x in enumerate(xs):
            x[::2, 3 + number :] = 0.0
    return xs, ys


def build(name, norm):
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    return MODELS[name][0](lambda **options: norm(dtype="float64", **options))


def stepped(model, x, y, total, *, in_graph, reduces, steps=2):
    """Outputs, gradients of inputs and weights of each step, and the weights after."""
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            output = model(x, training=True)
            loss = tf.reduce_sum((output - y) ** 2) / total
        if reduces:
            distributed = tfdist.DistributedGradientTape(tape, op=ReduceOp.SUM)
            gradients = distributed.gradient(loss, variables)
        else:
            gradients = tape.gradient(loss, variables)
        for v, g in zip(variables, gradients, strict=True):
            v.assign_sub(0.1 * g)
        return output, tape.gradient(loss, x), gradients

    step = tf.function(step) if in_graph else step
    seen = []
    for _ in range(steps):
        output, dx, gradients = step(tf.constant(x), tf.constant(y))
        seen.append([output.numpy(), dx.numpy(), [g.numpy() for g in gradients]])
    return seen, [w.numpy() for w in model.weights]


def on_ranks(name, batches, modes):
    def run():
        rank = tfdist.rank()
        xs, ys = data_of(name, batches)
        return [
            stepped(
                build(name, tfdist.layers.SyncBatchNormalization),
                xs[rank],
                ys[rank],
                sum(batches),
                in_graph=mode == "graph",
                reduces=True,
            )
            for mode in modes
        ]

    return in_float64(run)()


def on_one(name, batches):
    def run():
        x, y = (np.concatenate(parts) for parts in data_of(name, batches))
        model = build(name, PLAIN)
        return stepped(model, x, y, len(x), in_graph=False, reduces=False)

    return in_float64(run)()


def assert_close(found, expected, what):
    scale = np.max(np.abs(expected), initial=1e-3)
    error = np.max(np.abs(found - expected), initial=0.0) / scale
    assert error < 1e-10, f"{what}: relative error {error:.1e}"


USUAL = [("convolution", 3), ("sequence", 2), ("renormalised", 2)]


def cells():
    """Each model on both numbers of ranks; what is not usual is slow."""
    for name in MODELS:
        for size in BATCHES:
            marks = [] if (name, size) in USUAL else [pytest.mark.slow]
            yield pytest.param(name, size, marks=marks)


@pytest.mark.parametrize(("name", "size"), list(cells()))
def test_it_equals_the_layer_on_the_concatenated_batch(name, size):
    batches = BATCHES[size]
    ends = np.cumsum(batches)[:-1]
    expected_steps, expected_weights = on_one(name, batches)
    modes = ["eager", "graph"] if size == 3 or name == "dense" else ["eager"]
    ranks = run_ranks(on_ranks, size, name, list(batches), modes)
    for rank, found in enumerate(ranks):
        for mode, (steps, weights) in zip(modes, found, strict=True):
            what = f"{name}, rank {rank}, {mode}"
            for step, expected in zip(steps, expected_steps, strict=True):
                output, dx, gradients = expected
                assert_close(step[0], np.split(output, ends)[rank], f"{what}: output")
                assert_close(step[1], np.split(dx, ends)[rank], f"{what}: inputs")
                for number, (a, b) in enumerate(zip(step[2], gradients, strict=True)):
                    assert_close(a, b, f"{what}: gradient {number}")
            for number, (a, b) in enumerate(
                zip(weights, expected_weights, strict=True)
            ):
                assert_close(a, b, f"{what}: weight {number}")
        for a, b in zip(found[-1][1], ranks[0][-1][1], strict=True):
            assert a.tobytes() == b.tobytes()
