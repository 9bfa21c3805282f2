"""Adasum in one process: what is refused, and with which words."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import ReduceOp

ADASUM = {"op": ReduceOp.ADASUM}


@pytest.fixture(autouse=True)
def _world():
    tfdist.init()


def test_one_rank_gets_its_own_values():
    value = np.array([0.5, -2.0], np.float16)
    assert tfdist.allreduce(value, **ADASUM).numpy().tobytes() == value.tobytes()
    found = tfdist.allreduce(value, prescale=2.0, postscale=3.0, **ADASUM)
    assert found.numpy().tolist() == [3.0, -12.0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tfdist.allreduce(1, **ADASUM), TypeError, "tf.cast(value, tf.float32"),
        (lambda: tfdist.allreduce(1j, **ADASUM), TypeError, "real numbers"),
        (lambda: tfdist.reduce(1.0, **ADASUM), ValueError, "Use tfdist.allreduce"),
        (
            lambda: tfdist.reduce_scatter([1.0], **ADASUM),
            *(ValueError, "Use tfdist.allreduce"),
        ),
        (
            lambda: tfdist.DistributedGradientTape(sparse_as_dense=False, **ADASUM),
            *(ValueError, "combines whole tensors"),
        ),
    ],
)
def test_what_adasum_cannot_reduce_is_refused(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_a_gradient_through_adasum_is_not_defined():
    x = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = tfdist.allreduce(x, **ADASUM)
    with pytest.raises(ValueError, match="ADASUM"):
        tape.gradient(y, x)


def test_gradients_of_a_table_are_reduced_as_a_whole():
    table = tf.Variable(tf.ones([3, 2]))
    with tfdist.DistributedGradientTape(**ADASUM) as tape:
        loss = tf.reduce_sum(tf.gather(table, [1, 1]))
    assert tape.gradient(loss, table).numpy().tolist() == [[0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "Use a larger batch"),
        ({"use_ema": True}, "Average the weights with a callback"),
    ],
)
def test_options_of_an_optimizer_that_need_shared_gradients(options, words):
    optimizer = keras.optimizers.SGD(0.1, **options)
    optimizer = tfdist.DistributedOptimizer(optimizer, **ADASUM)
    v = keras.Variable([1.0])
    with pytest.raises(ValueError, match=words):
        optimizer.apply([tf.constant([1.0])], [v])
    assert v.numpy().tolist() == [1.0]


def test_float16_would_lose_small_changes():
    sgd, options = keras.optimizers.SGD(0.1), {"compression": "fp16", **ADASUM}
    with pytest.raises(ValueError, match="Use compression='bf16'"):
        tfdist.DistributedOptimizer(sgd, **options)


def test_an_elastic_job_is_refused(monkeypatch):
    monkeypatch.setenv("TFDIST_MEMBER", "1")
    with pytest.raises(NotImplementedError, match="without --min-np"):
        tfdist.DistributedGradientTape(**ADASUM)


def test_slots_that_are_weights_are_refused():
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this Keras has no ScheduleFreeAdamW")
    adam = tfdist.DistributedOptimizer(keras.optimizers.ScheduleFreeAdamW(), **ADASUM)
    with pytest.raises(ValueError, match="include a second set of weights"):
        adam.apply([tf.constant([1.0])], [keras.Variable([1.0])])


def test_a_scaled_rate_is_a_warning(caplog):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.1)
    model.compile(tfdist.DistributedOptimizer(sgd, **ADASUM), "mse")
    scale = tfdist.callbacks.LearningRateScale()
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[scale])
    assert "meant for the unscaled rate" in caplog.text


def test_a_weight_is_refused():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), **ADASUM)
    v = keras.Variable([1.0])
    with pytest.raises(ValueError, match="got ADASUM, which does not use weights"):
        optimizer.apply([tf.constant([1.0])], [v], weight=3)


def test_an_optimizer_keeps_constraints_and_skips_missing_gradients():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), **ADASUM)
    v = keras.Variable([0.5, 0.5])
    v.constraint = keras.constraints.NonNeg()
    w = keras.Variable([1.0])
    optimizer.build([v, w])
    optimizer.apply([tf.constant([1.0, 0.25]), None], [v, w])
    assert v.numpy().tolist() == [0.0, 0.25]
    assert w.numpy().tolist() == [1.0]
