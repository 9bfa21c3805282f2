"""The callbacks at size 1: the guards, and what can be seen in one process."""

import os
import re
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.checkpoints import checkpoints_in

import tfdist
from tfdist.callbacks import (
    BroadcastInitialState,
    Checkpoint,
    CombineMovingStatistics,
    LearningRateScale,
    LearningRateWarmup,
    MetricAverage,
    RankZeroOnly,
    StopOnSignal,
    StopTogether,
    _base,
    _per_rank_state,
    broadcast_initial_state,
)
from tfdist.callbacks._atomic_file import atomic_write
from tfdist.callbacks.learning_rate_warmup import rescale_velocities, velocities_of
from tfdist.core import native, runtime

X = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

ALL = {
    "BroadcastInitialState": BroadcastInitialState,
    "Checkpoint": lambda: Checkpoint("never.keras"),
    "CombineMovingStatistics": CombineMovingStatistics,
    "LearningRateScale": LearningRateScale,
    "LearningRateWarmup": LearningRateWarmup,
    "MetricAverage": MetricAverage,
    "RankZeroOnly": lambda: RankZeroOnly(keras.callbacks.LambdaCallback()),
    "StopTogether": StopTogether,
}


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch):
    tfdist.init()
    # Some tests pretend that there are more ranks, which then cannot be asked.
    monkeypatch.setattr(_base, "agree_on_callbacks", lambda *arguments: None)
    monkeypatch.setattr(_base, "check_same_epoch", lambda *arguments: None)


class Tower(keras.Model):
    """Built by its first batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = keras.layers.Dense(5, activation="tanh")
        self.noise = keras.layers.Dropout(0.1)
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.noise(self.first(x), training=training))


def built_model():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )


def compiled(model=None, optimizer=None, **options):
    model = built_model() if model is None else model
    if optimizer is None:
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return model


def fit(model, *callbacks, epochs=1, **options):
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **options
    )


class Watch(keras.callbacks.Callback):
    """Calls a function after every step."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.function())


# ---- the guards


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_that_does_not_reduce_is_refused_before_the_first_step(name):
    model = compiled(optimizer=keras.optimizers.Adam())
    before = [w.numpy() for w in model.weights]
    words = r"optimizer=tfdist.DistributedOptimizer\(keras.optimizers.Adam\(...\)\)"
    with pytest.raises(ValueError, match=words):
        fit(model, ALL[name]())
    for a, b in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


class Lookahead(keras.optimizers.SGD):
    """A class that is not in keras.optimizers."""


class SGD(keras.optimizers.SGD):
    """Another one, named like one that is."""


@pytest.mark.parametrize("own_class", [Lookahead, SGD])
def test_an_optimizer_of_the_users_own_is_named_without_kerass_module(own_class):
    words = rf"tfdist.DistributedOptimizer\({own_class.__name__}\(...\)\)"
    with pytest.raises(ValueError, match=words):
        fit(compiled(optimizer=own_class(0.1)), MetricAverage())


class OwnStep(keras.Sequential):
    """Trains with a tape; `reduces` says whether with ours."""

    reduces = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        if self.reduces:
            tape = tfdist.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step_model(reduces):
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.reduces = reduces
    return compiled(model, optimizer=keras.optimizers.SGD(0.1))


def test_a_train_step_with_our_tape_needs_no_wrapped_optimizer(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: 2)
    fit(own_step_model(True), LearningRateScale(1.0))


def test_a_first_step_without_a_reduction_is_an_error(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: 2)
    with pytest.raises(RuntimeError, match="DistributedGradientTape"):
        fit(own_step_model(False), LearningRateScale(1.0))


def test_accumulated_gradients_are_looked_for_when_they_are_reduced(monkeypatch):
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = compiled(optimizer=tfdist.DistributedOptimizer(sgd))
    monkeypatch.setattr(runtime, "size", lambda: 2)
    fit(model, LearningRateScale(1.0))  # 4 steps: one update
    fit(model, LearningRateScale(1.0))  # at its second step, and no later one
    model = own_step_model(False)
    model.optimizer.gradient_accumulation_steps = 3
    with pytest.raises(RuntimeError, match="DistributedGradientTape"):
        fit(model, LearningRateScale(1.0))


def test_the_broadcast_of_an_unbuilt_model_is_no_reduction(monkeypatch):
    model = OwnStep([keras.layers.Dense(1)])
    model.reduces = False
    compiled(model, optimizer=keras.optimizers.SGD(0.1))
    monkeypatch.setattr(runtime, "size", lambda: 2)
    monkeypatch.setattr(
        broadcast_initial_state, "broadcast_seed_generators", lambda *_, **__: 0
    )
    monkeypatch.setattr(
        _per_rank_state, "gather_from_all", lambda mark, *_, **__: [mark] * 2
    )
    monkeypatch.setattr(broadcast_initial_state, "check_alike", lambda *_: None)
    with pytest.raises(RuntimeError, match="DistributedGradientTape"):
        fit(model, BroadcastInitialState())


# ---- BroadcastInitialState


@pytest.fixture
def broadcasts(monkeypatch):
    """Paths given to broadcast_variables, and the iterations at that time."""
    calls = []

    def note(variables, root=0, process_set=None):
        iterations = [v for v in variables if v.path.endswith("/iteration")]
        calls.append(([v.path for v in variables], int(iterations[0].numpy()), root))

    monkeypatch.setattr(_per_rank_state, "broadcast_variables", note)
    return calls


IN_TURN = {"steps_per_execution": 4}


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((built_model, {"run_eagerly": True}), (Tower, {}), (Tower, IN_TURN)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((built_model, {}), (built_model, IN_TURN)),
                (Tower, {"run_eagerly": True}),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_state_is_sent_once_before_the_first_step(make, how, broadcasts):
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    model = compiled(make(), optimizer, **how)
    # A schedule makes callbacks build the train function again.
    fit(model, BroadcastInitialState(root=0), LearningRateScale(2.0), epochs=2)
    [(paths, iterations, root)] = broadcasts
    assert iterations == 0
    assert root == 0
    assert set(paths) == {v.path for v in model.weights + optimizer.variables}
    assert len(paths) == 4 + 2 + 2 * 4  # no seeds
    assert optimizer.iterations == 8


def test_a_schedule_does_not_lose_the_broadcast_of_an_unbuilt_model(broadcasts):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(schedule))
    fit(compiled(Tower(), optimizer), BroadcastInitialState(), LearningRateScale(2.0))
    assert len(broadcasts) == 1


def test_a_model_of_models_without_call_counts_as_built(broadcasts):
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = built_model()

        def train_step(self, data):
            x, y = data
            with tfdist.DistributedGradientTape() as tape:
                loss = tf.reduce_mean((self.part(x) - y) ** 2)
            variables = self.part.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    fit(
        compiled(Pair(), keras.optimizers.SGD(0.1)),
        BroadcastInitialState(),
    )
    [(paths, iterations, _)] = broadcasts
    assert iterations == 0
    assert len(paths) == 4 + 2


# ---- learning rates


def rate_of(optimizer):
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def test_the_rate_is_scaled_once_per_optimizer(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: 4)
    model = compiled()
    fit(model, LearningRateScale())
    fit(model, LearningRateScale())
    assert rate_of(model.optimizer) == pytest.approx(0.4)


class Fails(keras.callbacks.Callback):
    """Ends a training within its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("scale_first", "scheduled"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        *((True, False), (False, True)),
    ],
)
def test_a_restarted_training_has_the_rate_of_the_first(
    scale_first, scheduled, tmp_path
):
    def rates(*more):
        rate = 0.25
        if scheduled:
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([99], [rate, 0.0])
        model = compiled(
            optimizer=tfdist.DistributedOptimizer(keras.optimizers.SGD(rate))
        )
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        both = [RankZeroOnly(backup), LearningRateScale(2.0)]
        watch = Watch(lambda: rate_of(model.optimizer))
        listed = [BroadcastInitialState(), *both[:: -1 if scale_first else 1]]
        try:
            for epochs in (2, 3):
                fit(model, *listed, watch, *more, epochs=epochs)
        except ZeroDivisionError:
            pass
        return watch.seen

    assert rates(Fails()) == [0.5] * STEPS
    assert set(rates()) == {0.5}  # the restart, and a second fit


def test_a_restored_rate_is_not_scaled_again_and_that_is_said(tmp_path, caplog):
    path = tmp_path / "m.keras"
    model = compiled()
    fit(model, LearningRateScale(2.0))
    model.save(path)
    model = compiled()
    tfdist.restore(model, path)
    for _ in range(2):
        fit(model, LearningRateScale(2.0))
    assert rate_of(model.optimizer) == pytest.approx(0.2)
    [said] = [r.getMessage() for r in caplog.records if "LearningRateScale" in r.msg]
    assert "has taken 4 steps, so its learning rate, 0.2," in said


def test_rates_follow_the_ranks_of_the_optimizers_process_set(monkeypatch):
    alone = tfdist.add_process_set([0])
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.25), process_set=alone
    )
    model = compiled(optimizer=optimizer)
    watch = Watch(lambda: rate_of(optimizer))
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    fit(model, LearningRateScale(), LearningRateWarmup(1), watch)
    assert watch.seen == [0.25] * STEPS


def test_a_multiplier_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        LearningRateScale(0)


def test_a_schedule_is_scaled_also_after_it_was_traced():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])
    optimizer = keras.optimizers.SGD(schedule)
    model = compiled(optimizer=tfdist.DistributedOptimizer(optimizer))
    fit(model)  # traced with the schedule as it is
    before = [w.numpy() for w in model.weights]
    fit(model, LearningRateScale(1e-30))
    assert rate_of(optimizer) == pytest.approx(1e-32)
    for a, b in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_a_scaled_schedule_is_saved_as_the_plain_one(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(schedule))
    model = compiled(optimizer=optimizer)
    fit(model, LearningRateScale(3.0))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras").optimizer
    assert type(loaded._learning_rate) is type(schedule)
    assert rate_of(loaded) == pytest.approx(rate_of(model.optimizer) / 3)


@pytest.mark.parametrize("callback", [LearningRateScale, LearningRateWarmup])
def test_a_function_as_rate_is_refused(callback):
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(lambda: 0.1))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        fit(compiled(optimizer=optimizer), callback())


SIZE, STEPS = 4, 4  # ranks, steps in an epoch


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("warmup_epochs", [2, 1.5])
def test_the_rate_of_every_step_of_the_warm_up(scheduled, warmup_epochs, monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    rate = 0.1
    if scheduled:
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([10**6], [0.1, 0.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(rate))
    model = compiled(optimizer=optimizer)
    watch = Watch(lambda: rate_of(optimizer))
    fit(
        model,
        LearningRateWarmup(warmup_epochs),  # before the scale: the order is free
        LearningRateScale(),
        watch,
        epochs=4,
    )
    total = warmup_epochs * STEPS
    expected = [
        0.1 * (1 + (SIZE - 1) * min(1, step / total)) for step in range(4 * STEPS)
    ]
    np.testing.assert_allclose(watch.seen, expected, rtol=1e-6)
    assert watch.seen[0] == pytest.approx(0.1)  # the rate of one process
    assert watch.seen[int(total)] == pytest.approx(0.4)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_correction_is_equation_10(correction, nesterov, monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    momentum, target = 0.9, 0.02
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    start = np.array([[3.0], [-1.0], [0.5], [0.0]], "float32")
    model.set_weights([start])
    optimizer = keras.optimizers.SGD(target, momentum=momentum, nesterov=nesterov)
    compiled(model, tfdist.DistributedOptimizer(optimizer))
    warmup = LearningRateWarmup(2, momentum_correction=correction)
    watch = Watch(lambda: model.get_weights()[0].copy())
    fit(model, warmup, watch, epochs=3, shuffle=False)

    # v <- m (rate(i) / rate(i-1)) v + rate(i) g,  w <- w - v
    w, v, previous = start.astype("float64"), np.zeros((4, 1)), None
    for step, seen in enumerate(watch.seen):
        rate = LearningRateWarmup.rate_at(step, 2 * STEPS, target, SIZE)
        rows = slice(step % STEPS * 8, step % STEPS * 8 + 8)
        g = 2 * X[rows].T @ (X[rows] @ w - Y[rows]) / 8
        if correction and previous is not None:
            v = v * rate / previous
        v = momentum * v + rate * g
        w = w - (momentum * v + rate * g if nesterov else v)
        previous = rate
        np.testing.assert_allclose(seen, w, rtol=2e-5, atol=2e-6)


def test_rmsprop_with_momentum_is_corrected_and_adam_left_alone():
    v = keras.Variable(np.ones(3, "float32"))
    rmsprop = keras.optimizers.RMSprop(0.1, momentum=0.9)
    for optimizer in (rmsprop, keras.optimizers.Adam()):
        optimizer.apply([tf.ones(3)], [v])
    assert [id(m) for m in velocities_of(rmsprop)] == [
        id(m.value) for m in rmsprop._momentums
    ]
    assert velocities_of(keras.optimizers.Adam()) == []


def test_a_training_resumed_after_the_warm_up_keeps_its_rate(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    model = compiled()
    model.optimizer.learning_rate = 0.004  # as decayed later
    fit(model, LearningRateWarmup(2, target=0.4), initial_epoch=3, epochs=4)
    assert rate_of(model.optimizer) == pytest.approx(0.004)


def test_a_training_resumed_inside_the_warm_up_goes_on(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    model = compiled()
    watch = Watch(lambda: rate_of(model.optimizer))
    fit(model, LearningRateWarmup(2, target=0.4), watch, initial_epoch=1, epochs=2)
    expected = [0.1 * (1 + 3 * step / 8) for step in range(4, 8)]
    np.testing.assert_allclose(watch.seen, expected, rtol=1e-6)


def test_one_warm_up_warms_up_every_optimizer_once(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    warmup = LearningRateWarmup(1)
    for rate in (0.4, 0.8):
        model = compiled(
            optimizer=tfdist.DistributedOptimizer(keras.optimizers.SGD(rate))
        )
        watch = Watch(lambda model=model: rate_of(model.optimizer))
        for _ in range(2):
            fit(model, warmup, watch, epochs=2)
        expected = [rate / 4 * (1 + 3 * min(1, step / 4)) for step in range(8)]
        np.testing.assert_allclose(watch.seen, expected + [rate] * 8, rtol=1e-6)
        assert warmup.target is None


def test_a_warm_up_of_another_fit_goes_to_the_target_of_the_first(monkeypatch):
    monkeypatch.setattr(runtime, "size", lambda: SIZE)
    model = compiled()  # its rate, 0.1, is the target
    watch = Watch(lambda: rate_of(model.optimizer))
    fit(model, LearningRateWarmup(2), watch, epochs=1)
    fit(model, LearningRateWarmup(1), watch, epochs=2)
    rises = [[0.025 * (1 + 3 * step / n) for step in range(4)] for n in (8, 4)]
    np.testing.assert_allclose(watch.seen, [*sum(rises, []), *[0.1] * 4], rtol=1e-6)


def test_velocities_of_a_rate_of_0_stay_as_they_are():
    v = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9)
    optimizer.build([v])
    optimizer.momentums[0].assign(np.full(3, 2.0))
    rescale_velocities(optimizer, 0.0, 0.1)
    np.testing.assert_array_equal(optimizer.momentums[0].numpy(), [2.0] * 3)


def test_an_unknown_number_of_steps_is_asked_for():
    endless = tf.data.Dataset.from_tensors((X, Y)).repeat().filter(lambda x, y: True)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        compiled().fit(
            endless.take(3), verbose=0, callbacks=[LearningRateWarmup()], epochs=1
        )


@pytest.mark.parametrize(
    "options",
    [{"warmup_epochs": 0}, {"steps_per_epoch": 0}, {"target": 0.0}, {"target": -1}],
)
def test_wrong_arguments_of_the_warm_up_are_refused(options):
    with pytest.raises(ValueError, match="Expected"):
        LearningRateWarmup(**options)


# ---- Checkpoint


def files(folder):
    return sorted(os.listdir(folder))


def test_a_file_for_each_epoch_with_names_of_the_logs(tmp_path):
    model = compiled()
    fit(model, Checkpoint(tmp_path / "m-{epoch:02d}.keras"), epochs=2)
    assert checkpoints_in(tmp_path) == ["m-01.keras", "m-02.keras"]
    loaded = keras.models.load_model(tmp_path / "m-02.keras")
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_file_every_few_steps(steps_per_execution, tmp_path):
    path = tmp_path / "{epoch}-{batch}.weights.h5"
    model = compiled(steps_per_execution=steps_per_execution)
    fit(model, Checkpoint(path, save_weights_only=True, save_freq=2), epochs=2)
    assert checkpoints_in(tmp_path) == [
        f"{e}-{b}.weights.h5" for e in (1, 2) for b in (2, 4)
    ]


def test_only_the_best_is_kept(tmp_path):
    class Scripted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_accuracy"] = [0.5, 0.4, 0.7, 0.6][epoch]

    path = tmp_path / "{epoch}.keras"
    best = Checkpoint(path, monitor="val_accuracy", save_best_only=True)
    fit(compiled(), Scripted(), best, epochs=4)
    assert checkpoints_in(tmp_path) == ["1.keras", "3.keras"]


def test_a_monitor_that_is_not_in_the_logs_is_an_error(tmp_path):
    best = Checkpoint(tmp_path / "m.keras", monitor="val_los", save_best_only=True)
    with pytest.raises(ValueError, match=r"\['loss'\], or a mode, got 'val_los'"):
        fit(compiled(), best)


@pytest.mark.parametrize("name", ["{lossy}", "{loss:d}", "{loss.lossy}", "{epoch[0]}"])
def test_a_name_that_is_not_in_the_logs_is_an_error(name, tmp_path):
    words = rf"Expected names of \['epoch', 'loss', 'step'\] .*{re.escape(name)}"
    with pytest.raises(ValueError, match=words):
        fit(compiled(), Checkpoint(tmp_path / f"{name}.keras"))


def test_a_failed_save_keeps_what_was_saved_before(tmp_path, monkeypatch):
    model = compiled()
    path = tmp_path / "m.keras"
    fit(model, Checkpoint(path))
    good = path.read_bytes()

    def fails_half_way(target, **options):
        with open(target, "wb") as file:
            file.write(good[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save", fails_half_way)
    with pytest.raises(OSError, match="No space left"):
        fit(model, Checkpoint(path))
    assert path.read_bytes() == good
    assert checkpoints_in(tmp_path) == ["m.keras"]


def test_an_older_file_stays_until_a_newer_one_is_whole(tmp_path, monkeypatch):
    model = compiled()
    last = Checkpoint(tmp_path / "m-{epoch}.keras", keep=1)
    same = Checkpoint(tmp_path / "latest.keras", keep=1)
    fit(model, last, same, epochs=3)
    assert checkpoints_in(tmp_path) == ["latest.keras", "m-3.keras"]

    def fails(target, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save", fails)
    with pytest.raises(OSError, match="No space left"):
        fit(model, last, initial_epoch=3, epochs=4)
    assert checkpoints_in(tmp_path) == ["latest.keras", "m-3.keras"]


def test_content_is_on_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_replace(source, target):
        events.append(("replace", str(source), str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    path = tmp_path / "new folder" / "m.keras"
    atomic_write(path, lambda p: p.write_bytes(b"whole"))
    partial = events[0][1]
    assert events == [
        ("fsync", partial),
        ("replace", partial, str(path)),
        ("fsync", str(path.parent)),
    ]
    assert partial != str(path)
    assert partial.endswith("m.keras")
    assert path.read_bytes() == b"whole"


def test_what_a_killed_save_has_left_is_removed_and_not_what_is_being_written(tmp_path):
    left = tmp_path / ".partial-0123abcd-m-01.keras"
    written = tmp_path / ".partial-4567cdef-m-02.keras"
    other = tmp_path / ".partial-of-the-users-own"
    for path in (left, written, other):
        path.write_bytes(b"part")
    long_ago = time.time() - 7200
    for path in (left, other):
        os.utime(path, (long_ago, long_ago))
    atomic_write(tmp_path / "m-02.keras", lambda p: p.write_bytes(b"whole"))
    assert files(tmp_path) == [written.name, other.name, "m-02.keras"]


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path):
    real, link = tmp_path / "disk" / "model", tmp_path / "latest.keras"
    link.symlink_to(real)
    fit(compiled(), Checkpoint(link))
    assert link.readlink() == real
    assert checkpoints_in(real.parent) == ["model"]
    keras.models.load_model(link)


def test_torn_weights_are_not_saved(tmp_path, monkeypatch):
    model = own_step_model(True)  # its plain optimizer would not refuse
    callback = Checkpoint(tmp_path / "m.keras")
    fit(model, callback)
    good = (tmp_path / "m.keras").read_bytes()
    monkeypatch.setattr(native, "failure", lambda: native.CoreError(10, "rank 1 died"))
    monkeypatch.setattr(native, "good_steps", lambda: 7)
    with pytest.raises(RuntimeError, match="last good step is 7"):
        callback.on_epoch_end(1, {})
    assert (tmp_path / "m.keras").read_bytes() == good


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("m.h5", {}),
        ("m.keras", {"save_weights_only": True}),
        ("m.keras", {"save_freq": 0}),
        ("m.keras", {"save_freq": "batch"}),
        ("m.keras", {"save_freq": True}),
        ("m.keras", {"mode": "best"}),
        ("m.keras", {"initial_value_threshold": 0.5}),
        ("{}.keras", {}),
        ("{0}.keras", {}),
        ("m-{epoch.keras", {}),
        ("m-}.keras", {}),
    ],
)
def test_wrong_arguments_of_checkpoint_are_refused(path, options):
    with pytest.raises(ValueError, match="Expected"):
        Checkpoint(path, **options)


@pytest.mark.parametrize("signals", [[], [signal.SIGKILL], [0], [signal.SIGTERM, 999]])
def test_signals_that_cannot_be_handled_are_refused_at_once(signals):
    with pytest.raises(ValueError, match="Expected signals that a program can handle"):
        StopOnSignal(Checkpoint("latest.keras"), signals=signals)


def test_another_choice_of_seed_generators_is_refused_at_once():
    with pytest.raises(ValueError, match="'distinct', 'equal'"):
        BroadcastInitialState(seed_generators="same")


# ---- MetricAverage


def test_metrics_of_one_rank_stay_as_they_are():
    def history(*callbacks):
        keras.utils.set_random_seed(5)
        model = compiled(metrics=["mae", keras.metrics.R2Score()])
        return fit(
            model, *callbacks, epochs=2, shuffle=False, validation_data=(X[:9], Y[:9])
        ).history

    plain, averaged = history(), history(MetricAverage())
    assert list(plain) == list(averaged)
    for name in plain:
        np.testing.assert_allclose(plain[name], averaged[name], rtol=1e-6)


def test_the_example_of_the_package_changes_five_lines():
    import tfdist.callbacks

    example = tfdist.callbacks.__doc__
    assert [n for n in range(1, 8) if f"# {n}\n" in example] == [1, 2, 3, 4, 5]


def test_a_checkpoint_of_weights_says_which_argument_is_missing():
    with pytest.raises(ValueError, match="or pass save_weights_only=True"):
        Checkpoint("x.weights.h5")


# ---- MetricAverage in evaluate


def of_unknown_length():
    for _ in range(4):
        yield X[:8], Y[:8]


def test_evaluate_without_a_known_number_of_steps_is_refused():
    with pytest.raises(NotImplementedError, match="known number of steps"):
        compiled().evaluate(of_unknown_length(), verbose=0, callbacks=[MetricAverage()])


def test_a_metric_that_does_not_say_how_it_is_combined_is_refused_before_the_start():
    class Highest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="highest")
            self.highest = self.add_variable((), "zeros", name="highest")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.highest.assign(keras.ops.maximum(self.highest, keras.ops.max(y_pred)))

        def result(self):
            return self.highest

    model = compiled(metrics=[Highest()])
    before = [w.numpy() for w in model.weights]
    with pytest.raises(ValueError, match="tfdist_merge"):
        fit(model, MetricAverage())
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    with pytest.raises(ValueError, match="tfdist_merge"):
        model.evaluate(X, Y, verbose=0, callbacks=[MetricAverage()])
    Highest.tfdist_merge = "max"
    assert fit(compiled(metrics=[Highest()]), MetricAverage()).history["highest"]


def test_evaluate_that_ends_early_is_refused():
    class Stops(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

    with pytest.raises(NotImplementedError, match="not averaged"):
        compiled().evaluate(
            X, Y, batch_size=8, verbose=0, callbacks=[MetricAverage(), Stops()]
        )


def test_evaluate_with_numbers_that_are_no_metrics_is_refused():
    class Model(keras.Sequential):
        def test_step(self, data):
            return {**super().test_step(data), "other": tf.constant(1.0)}

    model = compiled(Model([keras.Input((4,)), keras.layers.Dense(1)]))
    with pytest.raises(NotImplementedError, match="'other'"):
        model.evaluate(X, Y, verbose=0, callbacks=[MetricAverage()])


def test_after_a_fit_that_raised_evaluate_is_not_taken_for_its_validation():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("no such label")

    average = MetricAverage()
    model = compiled()
    with pytest.raises(KeyError):
        fit(model, average, Fails())
    with pytest.raises(NotImplementedError, match="known number of steps"):
        model.evaluate(of_unknown_length(), verbose=0, callbacks=[average])
