"""Double buffering: the states of one process, and what cannot be combined with it."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.gradients import double_buffer

BUFFERED = {"double_buffering": True}


@pytest.fixture(autouse=True)
def _world():
    tfdist.init()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"op": tfdist.ReduceOp.ADASUM}, ValueError, "ADASUM cannot be used with"),
        ({"sparse_as_dense": False}, ValueError, "sparse_as_dense=False cannot be"),
        ({"local_variables": lambda _: False}, ValueError, "local_variables cannot be"),
        ({"double_buffering": "yes"}, ValueError, "Expected double_buffering=True"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, error, words):
    for wrapped in (
        lambda **own: tfdist.DistributedOptimizer(keras.optimizers.SGD(), **own),
        tfdist.DistributedGradientTape,
    ):
        with pytest.raises(error, match=words):
            wrapped(**{**BUFFERED, **options})


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            "gradient_accumulation_steps cannot be used",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "Use the policy mixed_bfloat16",
        ),
    ],
)
def test_optimizers_that_cannot_use_earlier_gradients_are_refused(optimizer, words):
    optimizer = optimizer()
    with pytest.raises(ValueError, match=words):
        tfdist.DistributedOptimizer(optimizer, **BUFFERED)
    assert not hasattr(optimizer, "tfdist_options")  # still as before


def test_accumulation_that_is_set_later_is_refused():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(), **BUFFERED)
    optimizer.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps cannot be used"):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])


def test_uneven_data_are_refused():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.5)
    model.compile(tfdist.DistributedOptimizer(sgd, **BUFFERED), "mse")
    callbacks = [tfdist.callbacks.UnevenData()]
    with pytest.raises(NotImplementedError, match="UnevenData cannot be used with dou"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=callbacks)


def test_atomic_steps_are_refused(monkeypatch):
    monkeypatch.setattr("tfdist.gradients.reduction.gated", lambda: True)
    with tfdist.DistributedGradientTape(**BUFFERED) as tape:
        v = tf.Variable(1.0)
        loss = v * v
    with pytest.raises(ValueError, match="TFDIST_ATOMIC_STEPS=1 cannot be used"):
        tape.gradient(loss, v)


def test_an_elastic_job_is_refused(monkeypatch):
    monkeypatch.setattr("tfdist.gradients.options.renewal.is_elastic", lambda _: True)
    with pytest.raises(NotImplementedError, match="without --min-np"):
        tfdist.DistributedGradientTape(**BUFFERED)


def test_a_loaded_state_begins_with_a_first_step(tmp_path):
    """Gradients of the state before are not applied to the loaded one."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    sgd = keras.optimizers.SGD(0.5)
    model.compile(tfdist.DistributedOptimizer(sgd, **BUFFERED), "mse")
    kernel = model.trainable_variables[0]
    grad = tf.constant([[1.0]])
    kernel.assign([[4.0]])
    model.optimizer.apply([grad], [kernel])
    model.optimizer.apply([grad], [kernel])
    assert kernel.numpy().tolist() == [[3.5]]
    path = tmp_path / "state.weights.h5"
    model.save_weights(path)
    model.load_weights(path)
    model.optimizer.apply([grad], [kernel])
    assert kernel.numpy().tolist() == [[3.5]]
    model.optimizer.apply([2 * grad], [kernel])
    assert kernel.numpy().tolist() == [[3.0]]


def test_the_stored_gradients_are_not_saved():
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5), **BUFFERED)
    v = keras.Variable(np.ones(3, "float32"))
    sgd.apply([tf.ones(3)], [v])
    assert all(variable.shape == () for variable in sgd.variables)


def test_eager_steps_warn_once(caplog):
    v = tf.Variable(1.0)
    for _ in range(2):
        with tfdist.DistributedGradientTape(**BUFFERED) as tape:
            loss = v * v
        tape.gradient(loss, v)
    warnings = [r for r in caplog.records if "Run the step in a tf.function" in r.msg]
    assert len(warnings) == 1


def test_lists_of_variables_have_stored_gradients_of_their_own():
    a, b = keras.Variable([0.0]), keras.Variable([0.0])
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), **BUFFERED)
    sgd.build([a, b])
    for _ in range(2):
        sgd.apply([tf.constant([1.0])], [a])
        sgd.apply([tf.constant([100.0])], [b])
    assert (float(a.numpy()[0]), float(b.numpy()[0])) == (-1.0, -100.0)


def test_gradients_that_come_and_go_are_refused():
    a, b = keras.Variable([0.0]), keras.Variable([0.0])
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), **BUFFERED)
    sgd.build([a, b])
    one = tf.constant([1.0])
    tf.function(lambda: sgd.apply([one, None], [a, b]))()
    with pytest.raises(ValueError, match="the same variables need gradients in every"):
        tf.function(lambda: sgd.apply([one, one], [a, b]))()


def test_a_tape_under_a_loss_scale_is_refused():
    v = tf.Variable(1.0)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with tfdist.DistributedGradientTape(**BUFFERED) as tape:
            loss = v * v
        with pytest.raises(ValueError, match="Use the policy mixed_bfloat16"):
            tape.gradient(loss, v)
    finally:
        keras.config.set_dtype_policy("float32")


def test_new_variables_do_not_get_gradients_of_deleted_ones():
    kept = tf.Variable(1.0)
    for _ in range(30):
        head = tf.Variable(2.0)
        with tfdist.DistributedGradientTape(**BUFFERED) as tape:
            loss = kept * head
        assert [float(g) for g in tape.gradient(loss, [kept, head])] == [0.0, 0.0]
        del head, tape, loss
    gc.collect()
    assert len(double_buffer._buffers) <= 1


def test_each_fit_begins_with_a_first_step():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), **BUFFERED)
    model.compile(sgd, "mse")
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    for fits in (1, 2):
        model.fit(
            np.ones((8, 1)),
            np.ones((8, 1)),
            batch_size=2,
            verbose=0,
            callbacks=callbacks,
        )
        assert int(sgd.iterations) == 3 * fits
