"""Optimizers in the spellings of Keras 2: each works, and shows the new one, once."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras2_mode import X, Y, linear_model, mode, step_of, told  # noqa: F401

import tfdist.horovod.tensorflow.keras as hvd
from tfdist.horovod import keras2

# ---- optimizers


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_assignment_to_lr_changes_the_rate_of_the_next_step(wrapped):
    optimizer = keras.optimizers.SGD(lr=0.125)
    if wrapped:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    model = linear_model(optimizer)
    assert step_of(model) == 0.125
    model.optimizer.lr = 0.0625  # the graph of the step is made already
    assert step_of(model) == 0.0625
    assert float(model.optimizer.lr) == float(optimizer.learning_rate) == 0.0625
    model.optimizer.lr.assign(0.03125)
    assert step_of(model) == 0.03125
    keras.backend.set_value(model.optimizer.lr, 0.25)
    assert step_of(model) == 0.25
    assert tf.keras.backend.get_value(model.optimizer.lr) == 0.25


def test_each_spelling_is_told_once_with_the_new_one():
    def often():
        for _ in range(2):
            optimizer = keras.optimizers.Adam(lr=0.5)
            optimizer.lr = optimizer.lr * 0.5

    _, texts = told(often)
    assert texts == [
        "Adam(lr=...) is a spelling of Keras 2. Write Adam(learning_rate=...).",
        "optimizer.lr is a spelling of Keras 2. Write optimizer.learning_rate.",
    ]


def test_only_rank_0_is_told(monkeypatch):
    monkeypatch.setenv("TFDIST_RANK", "1")
    monkeypatch.setenv("TFDIST_SIZE", "2")
    assert told(lambda: keras.optimizers.SGD(lr=0.5))[1] == []


def test_a_warning_points_to_the_line_of_the_script():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras.optimizers.SGD(lr=0.5)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("rate", [1, np.float32(0.5), np.int64(2), 0.25])
def test_rates_may_be_any_number(rate):
    assert float(keras.optimizers.SGD(rate).learning_rate) == rate
    assert float(keras.optimizers.SGD(lr=rate).learning_rate) == rate


def test_decay_divides_the_rate_by_one_plus_decay_times_steps():
    model = linear_model(keras.optimizers.SGD(0.125, decay=0.5))
    steps = [step_of(model) for _ in range(3)]
    np.testing.assert_allclose(steps, [0.125, 0.125 / 1.5, 0.0625], rtol=1e-6)
    model.optimizer.lr = 0.25  # as in Keras 2: of the rate that decays
    assert float(model.optimizer.lr) == 0.25
    np.testing.assert_allclose(step_of(model), 0.25 / 2.5, rtol=1e-6)


def test_callbacks_set_the_rate_that_decays():
    hvd.init()
    callbacks = [
        hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5, end_epoch=1),
        hvd.callbacks.LearningRateScheduleCallback(0.5, lambda e: 0.25, start_epoch=1),
    ]
    sgd = keras.optimizers.SGD(0.0625, decay=0.5, momentum=0.5)
    model = linear_model(hvd.DistributedOptimizer(sgd))
    kernel, weights = model.layers[-1].kernel, []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(
            float(kernel.numpy()[0, 0])
        )
    )
    told = model.fit(X, Y, epochs=2, verbose=0, callbacks=[*callbacks, noted]).history
    assert told["lr"] == [0.25, 0.125]
    # The gradient is 4 w. Momentum is corrected by 0.25 / 0.0625, then 0.125 / 0.25.
    first = -0.25 * 4
    assert weights[0] == 1.0 + first
    second = 0.5 * (first * 0.5) - 0.125 / 1.5 * 4 * weights[0]
    np.testing.assert_allclose(weights[1], weights[0] + second, rtol=1e-6)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=1)
    again = model.fit(X, Y, verbose=0, callbacks=[warmup])
    assert again.history["lr"] == [0.5]


def test_callbacks_of_keras_set_the_rate_that_decays():
    model = linear_model(keras.optimizers.SGD(0.0625, decay=0.5))
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 2)
    told = model.fit(X, Y, epochs=2, verbose=0, callbacks=[rates]).history
    assert told["learning_rate"] == [0.125, 0.25]
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
    plateau.set_model(model)
    plateau.on_train_begin()
    for epoch in range(2):
        plateau.on_epoch_end(epoch, {"loss": 1.0})
    assert float(model.optimizer.learning_rate) == 0.125
    np.testing.assert_allclose(step_of(model), 0.125 / 2, rtol=1e-6)
    model.optimizer.learning_rate.assign(0.5)
    np.testing.assert_allclose(step_of(model), 0.5 / 2.5, rtol=1e-6)
    keras.backend.set_value(model.optimizer.learning_rate, 0.375)
    np.testing.assert_allclose(step_of(model), 0.375 / 3, rtol=1e-6)
    model.optimizer.learning_rate = 1.0
    np.testing.assert_allclose(step_of(model), 1.0 / 3.5, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda x: x, hvd.DistributedOptimizer])
def test_weight_decay_uses_the_current_rate(wrap):
    hvd.init()
    sgd = wrap(keras.optimizers.SGD(0.5, decay=0.5, weight_decay=0.25))
    w = keras.Variable([1.0])
    for steps in range(2):
        w.assign([1.0])
        sgd.apply([keras.ops.zeros((1,))], [w])
        np.testing.assert_allclose(w.numpy(), 1 - 0.25 * 0.5 / (1 + 0.5 * steps))


def test_a_decaying_optimizer_is_saved_as_one_of_keras(tmp_path):
    model = linear_model(keras.optimizers.SGD(0.25, decay=0.5))
    step_of(model)
    model.save(tmp_path / "m.keras")
    keras2.deactivate()
    loaded = keras.models.load_model(tmp_path / "m.keras")
    schedule = loaded.optimizer._learning_rate
    assert type(schedule) is keras.optimizers.schedules.InverseTimeDecay
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.25 / 1.5)


def test_arguments_without_an_effect_are_left_out():
    made, texts = told(
        lambda: keras.optimizers.Adam(0.5, epsilon=None, decay=0.0, jit_compile=True)
    )
    assert made.epsilon == 1e-7
    assert [text.split(" is ")[0] for text in texts] == ["Adam(jit_compile=...)"]
    with pytest.raises((TypeError, ValueError), match="nothing"):
        keras.optimizers.Adam(nothing=1)


def test_classes_of_the_users_own_take_them_too():
    class Mine(keras.optimizers.SGD):
        def __init__(self, own=1, **kwargs):
            super().__init__(**kwargs)
            self.own = own

    assert float(Mine(lr=0.5, own=2).learning_rate) == 0.5


@pytest.mark.parametrize("by_name", [False, True])
def test_lr_wins_over_a_default_that_a_class_passes_on(by_name):
    class Mine(keras.optimizers.SGD):
        def __init__(self, learning_rate=0.25, **kwargs):
            given = {"learning_rate": learning_rate} if by_name else {}
            super().__init__(*([] if by_name else [learning_rate]), **given, **kwargs)

    assert float(Mine(lr=0.5).learning_rate) == 0.5
    assert float(Mine().learning_rate) == 0.25


def test_a_schedule_with_a_type_of_its_own_is_no_number():
    class Constant(keras.optimizers.schedules.LearningRateSchedule):
        dtype = "float32"

        def __call__(self, step):
            return 0.125

    assert step_of(linear_model(keras.optimizers.SGD(Constant()))) == 0.125


def test_values_of_an_optimizer_are_taken_over():
    first, second = (linear_model(keras.optimizers.Adam(rate)) for rate in (0.5, 0.25))
    step_of(first)
    values = first.optimizer.get_weights()
    second.optimizer.build(second.trainable_variables)
    _, (text,) = told(lambda: second.optimizer.set_weights(values))
    assert "v.assign(value)" in text
    taken = second.optimizer.get_weights()
    assert all(map(np.array_equal, taken, values)) and len(taken) == 4
    with pytest.raises(ValueError, match="Build the optimizer first"):
        keras.optimizers.Adam().set_weights(values)


@pytest.mark.parametrize("wrapped", [False, True])
def test_variables_may_be_called(wrapped):
    optimizer = keras.optimizers.Adam(0.5)
    if wrapped:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    linear_model(optimizer).fit(X, Y, verbose=0)
    called, texts = told(optimizer.variables)
    assert called == optimizer.variables == optimizer.weights and len(called) == 4
    assert type(called) is list
    assert len(texts) == 1
    values = optimizer.get_weights()
    assert [v.shape for v in values] == [v.shape for v in called]


def test_apply_gradients_takes_a_name():
    w = tf.Variable(1.0)
    optimizer = keras.optimizers.SGD(1.0)
    _, texts = told(
        lambda: optimizer.apply_gradients([(tf.constant(0.5), w)], name="train")
    )
    assert float(w) == 0.5 and len(texts) == 1
    optimizer.apply_gradients(
        [(tf.constant(0.25), w)], experimental_aggregate_gradients=False
    )
    assert float(w) == 0.25
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(NotImplementedError, match="reduce the gradients again"):
        optimizer.apply_gradients([], experimental_aggregate_gradients=False)


@pytest.mark.parametrize("part", ["legacy", "experimental"])
@pytest.mark.parametrize("face", [keras, tf.keras, tf])
def test_optimizers_of_other_modules_are_those_that_there_are(part, face):
    found, texts = told(lambda: getattr(face.optimizers, part).RMSprop)
    assert found is keras.optimizers.RMSprop
    new = "Write keras.optimizers.RMSprop."
    assert texts == [f"keras.optimizers.{part}.RMSprop is a spelling of Keras 2. {new}"]
    assert getattr(face.optimizers, part).Nadam is keras.optimizers.Nadam
    with pytest.raises(AttributeError, match="Keras 3 has no optimizer 'Nothing'"):
        _ = getattr(face.optimizers, part).Nothing


@pytest.mark.parametrize("name", ["get_gradients", "get_updates"])
def test_symbolic_gradients_are_refused(name):
    with pytest.raises(NotImplementedError, match="tf.GradientTape"):
        getattr(keras.optimizers.SGD(0.5), name)(None, [])


# ---- loss scale


def scaled_loop(optimizer, clip, traced):
    """Two steps of a loop as mixed-precision scripts of Keras 2 have it."""
    w = keras.Variable([1.0, 2.0])
    seen = []

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w.value**2)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, [w.value])
        unscaled = optimizer.get_unscaled_gradients([*gradients, None])
        assert unscaled[1] is None
        clipped, _ = tf.clip_by_global_norm(unscaled[:1], clip)
        optimizer.apply_gradients(zip(clipped, [w], strict=True))
        return gradients[0], unscaled[0]

    run = tf.function(step) if traced else step
    for _ in range(2):
        seen.append([t.numpy().tolist() for t in run()])
    return w.numpy().tolist(), seen


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_scaled_losses_and_unscaled_gradients(wrapped, traced):
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=8.0, dynamic_growth_steps=1
    )
    if wrapped:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    w, seen = scaled_loop(optimizer, 1e9, traced)
    assert w == [0.25, 0.5]
    # The scale doubles after each step, also in a graph made before it.
    assert seen[0] == [[16.0, 32.0], [2.0, 4.0]]
    assert seen[1] == [[16.0, 32.0], [1.0, 2.0]]
    assert float(optimizer.loss_scale) == 32.0


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_a_wrapped_optimizer_in_a_loop_is_what_it_was_in_mixed_float16(mixed_float16):
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25))
    w = keras.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w.value**2)
        grads = tape.gradient(loss, [w.value])
        optimizer.apply_gradients(zip(grads, [w], strict=True))

    step()
    assert w.numpy().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("traced", [False, True])
def test_the_scale_of_mixed_float16_counts_for_scaled_losses(mixed_float16, traced):
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25))
    w, seen = scaled_loop(optimizer, 1e9, traced)
    assert w == [0.25, 0.5]
    assert seen[0] == [[2.0**16, 2.0**17], [2.0, 4.0]]
    assert int(optimizer.step_counter) == 2


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**127
    )
    w = keras.Variable([1.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(w.value * 4.0))
        scaled = tape.gradient(loss, [w.value])
        grads = optimizer.get_unscaled_gradients(scaled)
        optimizer.apply_gradients(zip(grads, [w], strict=True))

    step()
    assert w.numpy() == [1.0] and float(optimizer.dynamic_scale) == 2.0**126
    step()
    step()
    assert w.numpy() == [-3.0]


def test_keras_3s_own_way_is_as_it_was():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=8.0
    )
    scaled_loop(optimizer, 1e9, False)
    w = optimizer._trainable_variables[0]
    w.assign([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(w.value**2))
    optimizer.apply(tape.gradient(loss, [w.value]), [w])
    assert w.numpy().tolist() == [0.5, 1.0]
