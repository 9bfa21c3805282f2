"""`jit_compile=True` on two ranks equals `jit_compile=False`: forward and backward are
compiled by XLA, reduction and update run outside. (`test_jit_compile_xla.py` tests
steps that XLA compiles as a whole.)

XLA fuses operations and so rounds in other places; 1e-5 is allowed. Dropout is left
out of this comparison: XLA draws other random numbers.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS, BATCH, EPOCHS, FITS = 5, 6, 2, 2
TOLERANCE = 1e-5


def samples():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(STEPS * BATCH, 6)).astype("float32")
    return x, (np.sin(x).sum(axis=1, keepdims=True) + x[:, :1] * x[:, 1:2])


def layers():
    return [
        keras.layers.Dense(9, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(7, activation="softplus"),
        keras.layers.Dense(1),
    ]


class OwnStep(keras.Sequential):
    """Built by its first batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


MODELS = {
    "functional": lambda: keras.Sequential([keras.Input((6,)), *layers()]),
    "own step": lambda: OwnStep(layers()),
    "steps_per_execution": lambda: keras.Sequential(layers()),
}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def trained(kind, jit_compile):
    """Weights, slots, losses, reductions in each fit, and lines of the log."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(tfdist.rank())
    model = MODELS[kind]()
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.02), xla="off")
    model.compile(
        optimizer,
        "mse",
        metrics=["mae"],
        jit_compile=jit_compile,
        steps_per_execution=3 if kind == "steps_per_execution" else 1,
    )
    data = tfdist.data.shard(samples(), batch_size=BATCH // tfdist.size())
    handler, logger = Lines(), logging.getLogger("tfdist")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    losses, counts = [], []
    try:
        for _ in range(FITS):
            reductions()
            losses += model.fit(
                data,
                verbose=0,
                epochs=EPOCHS,
                callbacks=[tfdist.callbacks.BroadcastInitialState()],
            ).history["loss"]
            counts.append(reductions())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert model.jit_compile == jit_compile
    found = [v.numpy() for v in [*model.weights, *optimizer.variables]]
    return found, losses, counts, [line for line in handler.lines if "XLA" in line]


def reductions():
    """How many buckets of gradients were reduced since the last call."""
    rows = native.take_records()
    return sum(row["name"].startswith("gradients.") for row in rows)


def train_both_ways(kind):
    return [trained(kind, jit_compile) for jit_compile in (False, True)]


@pytest.mark.parametrize(
    "kind",
    [
        "functional",
        pytest.param("own step", marks=pytest.mark.slow),
        pytest.param("steps_per_execution", marks=pytest.mark.slow),
    ],
)
def test_fit_equals_that_without_xla(kind):
    ranks = run_ranks(train_both_ways, 2, kind, timeout_s=110)
    for plain, compiled in ranks:
        for a, b in zip(plain[0], compiled[0], strict=True):
            np.testing.assert_allclose(b, a, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(compiled[1], plain[1], rtol=TOLERANCE)
        assert compiled[1][-1] < compiled[1][0]
        assert compiled[2] == plain[2] == [STEPS * EPOCHS] * FITS  # one bucket a step
        assert plain[3] == []
    (_, first), (_, second) = ranks
    for a, b in zip(first[0], second[0], strict=True):
        # The moving statistics are those of each rank's own samples.
        assert a.tobytes() == b.tobytes() or a.shape == (9,)
    assert [len(first[3]), len(second[3])] == [1, 0]
    assert "compiles the forward and backward pass" in first[3][0]


class LogsOfTheUpdate(keras.Sequential):
    """Its logs are those of Keras, and something that the optimizer has updated."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "after": self.after(self)}


AFTER = {
    "scheduled rate": lambda model: model.optimizer.learning_rate,
    "iterations": lambda model: model.optimizer.iterations,
    "bias": lambda model: model.layers[-1].bias,
}


def log_both_ways(kind):
    return [logged(kind, jit_compile) for jit_compile in (False, True)]


def logged(kind, jit_compile):
    """Logs of two epochs, weights, and warnings."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(tfdist.rank())
    model = LogsOfTheUpdate([keras.Input((6,)), *layers()])
    model.after = AFTER[kind]
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.9)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(rate), xla="off")
    # The metrics are first built by the trace that finds that it cannot be cut.
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    data = tfdist.data.shard(samples(), batch_size=BATCH // tfdist.size())
    handler, logger = Lines(), logging.getLogger("tfdist")
    logger.addHandler(handler)
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ]
    try:
        history = model.fit(data, verbose=0, epochs=EPOCHS, callbacks=callbacks).history
    finally:
        logger.removeHandler(handler)
    return history, [v.numpy() for v in model.weights], handler.lines


# In one process: tests/single/test_jit_compile.py, which is not slow.
@pytest.mark.slow
@pytest.mark.parametrize("kind", AFTER)
def test_a_step_that_logs_what_was_updated_logs_the_same(kind):
    for rank, found in enumerate(run_ranks(log_both_ways, 2, kind, timeout_s=110)):
        plain, compiled = found
        assert compiled[0] == plain[0]
        assert set(plain[0]) == {"loss", "mae", "after"}
        if kind == "iterations":
            assert plain[0]["after"] == [STEPS, 2 * STEPS]
        for a, b in zip(plain[1], compiled[1], strict=True):
            np.testing.assert_array_equal(a, b)
        for lines in (plain[2], compiled[2]):
            lines[:] = [one for one in lines if "moving statistics" not in one]
        assert plain[2] == []
        assert ["has no effect" in line for line in compiled[2]] == [True][rank:]
