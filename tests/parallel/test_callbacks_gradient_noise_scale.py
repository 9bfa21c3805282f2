"""The gradient noise scale of `fit` is that of NumPy, on the gradients of the data."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.gradients.noise_scale import noise_scale

PER_RANK, STEPS = 4, 30


class MeanOutput(keras.losses.Loss):
    """The mean of the outputs, whose gradient is the mean of the inputs."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(y_pred, axis=-1)


def inputs(rank):
    """Gradients of samples: 8 numbers of mean 1 and variance 25."""
    rng = np.random.default_rng([2, rank])
    return (1 + 5 * rng.standard_normal((STEPS * PER_RANK, 8))).astype("float32")


def compiled(**options):
    keras.utils.clear_session()
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    steps = options.pop("gradient_accumulation_steps", None)
    sgd = keras.optimizers.SGD(0.0, gradient_accumulation_steps=steps)
    model.compile(tfdist.DistributedOptimizer(sgd, **options), MeanOutput())
    return model


def measured(options, fit_options):
    model = compiled(**options)
    x = inputs(tfdist.rank())
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(PER_RANK)
    noise = tfdist.callbacks.GradientNoiseScale(PER_RANK * tfdist.size())
    callbacks = [tfdist.callbacks.BroadcastInitialState(), noise]
    model.fit(data, verbose=0, callbacks=callbacks[:1])  # traced without
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks, **fit_options)
    later = model.fit(data, verbose=0, callbacks=callbacks[:1])
    return history.history["noise_scale"], list(later.history)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        pytest.param(3, {"gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
        pytest.param(2, {"xla": "off", "name": "x"}, marks=pytest.mark.slow),
    ],
)
def test_it_is_that_of_the_gradients(size, options):
    accumulated = options.get("gradient_accumulation_steps") or 1
    means = np.array(
        [
            inputs(rank).reshape(STEPS // accumulated, -1, 8).mean(axis=1)
            for rank in range(size)
        ],
        np.float64,
    )
    own = PER_RANK * accumulated
    wanted = noise_scale(
        float(np.mean(np.sum(means**2, axis=-1))),
        float(np.mean(np.sum(means.mean(axis=0) ** 2, axis=-1))),
        own_batch=own,
        batch=own * size,
    )
    assert 10 < wanted < 45  # 8 * 25 / 8 for endless data
    for found, later in run_ranks(measured, size, options, {}, timeout_s=100):
        np.testing.assert_allclose(found, [wanted, wanted], rtol=1e-4)
        assert later == ["loss"]


def with_an_embedding():
    """Rows that occur twice; one rank's step is not finite and is left out."""
    table = keras.Variable(np.zeros((3, 2), "float32"), name="table")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.0), sparse_as_dense=False
    )
    from tfdist.gradients.noise_scale import GradientSquares, measure

    squares = GradientSquares()
    measure(optimizer, squares)
    for value in (1.0, np.inf if tfdist.rank() else 1.0):
        values = tf.constant([[value, 0.0], [value, 0.0]])
        row = tf.IndexedSlices(values, tf.constant([1, 1]), tf.constant([3, 2]))
        optimizer.apply([row], [table])
    return squares.take()


def test_rows_are_added_before_they_are_squared():
    assert run_ranks(with_an_embedding, 2, timeout_s=60) == [[4.0, 4.0, 1.0]] * 2


def weighted():
    model = compiled()
    x = inputs(tfdist.rank())[: 8 + tfdist.rank()]
    callbacks = [
        tfdist.callbacks.UnevenData(),
        tfdist.callbacks.GradientNoiseScale(8),
    ]
    with pytest.raises(NotImplementedError, match="needs batches of equal size"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    return True


def test_weighted_steps_are_refused():
    assert run_ranks(weighted, 2, timeout_s=60) == [True, True]


def after_a_failure():
    """An error ends the fit that measured; a step by hand then has weights."""
    model = compiled()
    x = inputs(tfdist.rank())

    def fail(batch, logs):
        raise OSError("the disk is gone")

    callbacks = [
        tfdist.callbacks.GradientNoiseScale(8),
        keras.callbacks.LambdaCallback(on_train_batch_end=fail),
    ]
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    initial = tfdist.callbacks.BroadcastInitialState()
    model.fit(x, x[:, :1], verbose=0, callbacks=[initial])
    grads = [tf.zeros(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(grads, model.trainable_variables, weight=1 + tfdist.rank())
    return True


def test_a_fit_that_failed_measures_no_more():
    assert run_ranks(after_a_failure, 2, timeout_s=60) == [True, True]


class ByTape(keras.Sequential):
    """Its steps do not use its optimizer."""

    def train_step(self, data):
        x, _ = data
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        for v, g in zip(self.trainable_variables, grads, strict=True):
            v.assign_sub(0.0 * g)
        return {"loss": loss}


def not_measured():
    model = ByTape([keras.Input((8,)), keras.layers.Dense(1, use_bias=False)])
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(sgd, "mse", jit_compile=False)
    x = inputs(tfdist.rank())
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tfdist").addHandler(handler)
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.GradientNoiseScale(64),
    ]
    history = model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    logging.getLogger("tfdist").removeHandler(handler)
    told = any("has measured no step of epoch 1" in text for text in messages)
    return told, "noise_scale" in history.history


def test_steps_without_the_optimizer_are_told_of():
    found = run_ranks(not_measured, 2, timeout_s=60)
    assert [tuple(one) for one in found] == [(True, False), (False, False)]


def refused():
    x = inputs(0)
    for options, batch in (
        ({"double_buffering": True}, 8),
        ({"op": tfdist.ReduceOp.SUM}, 8),
    ):
        with pytest.raises(ValueError, match="averaged in their own step"):
            compiled(**options).fit(
                x,
                x[:, :1],
                verbose=0,
                callbacks=[tfdist.callbacks.GradientNoiseScale(batch)],
            )
    with pytest.raises(tfdist.MismatchError, match="global_batch"):
        noise = tfdist.callbacks.GradientNoiseScale(8 + tfdist.rank())
        compiled().fit(x, x[:, :1], verbose=0, callbacks=[noise])
    return True


def test_what_cannot_be_measured_is_refused_on_all_ranks():
    assert run_ranks(refused, 2, timeout_s=60) == [True, True]


def growing():
    """Batches of 8 in one epoch, and of 16 in the next; the estimate stays."""
    model = compiled()
    x = np.concatenate([inputs(rank) for rank in range(48)])
    schedule = tfdist.data.BatchSchedule({0: 8, 1: 16})
    data = tfdist.data.global_batches((x, x[:, :1]), global_batch=schedule, seed=1)
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.Elastic(),
        tfdist.callbacks.GradientNoiseScale(schedule),
    ]
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    return history.history["noise_scale"]


@pytest.mark.slow
def test_a_batch_that_grows_does_not_change_the_estimate():
    (first, second), other = run_ranks(growing, 2, timeout_s=100)
    assert other == [first, second]
    assert 18 < first < 35
    assert second == pytest.approx(first, rel=0.25)
