"""RankZeroOnly: runs on rank 0, and what it decides reaches all ranks."""

import csv
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import RankZeroOnly, StopTogether
from tfdist.core import native

HOOKS = sorted(n for n in dir(keras.callbacks.Callback) if n.startswith("on_"))


def model_and_data(**options):
    """Three steps an epoch; other samples on every rank."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.25))
    model.compile(optimizer, "mse", jit_compile=False, **options)
    rng = np.random.default_rng(50 + tfdist.rank())
    x = rng.normal(size=(12, 2)).astype("float32")
    return model, x, x[:, :1]


def fit(callbacks, epochs=2, **options):
    model, x, y = model_and_data()
    model.fit(
        x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks, **options
    )
    return model


def everything(model):
    return [v.numpy() for v in model.weights + model.optimizer.variables]


def same_on_all(results):
    for own in results:
        for a, b in zip(own, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


def recorder(calls):
    """A callback that has every hook and notes its calls."""

    def note(name):
        def hook(self, *arguments, logs=None):
            positions = [a for a in arguments if isinstance(a, int)]
            given = [a for a in [*arguments, logs] if isinstance(a, dict)]
            calls.append([name, positions, sorted(given[0]) if given else []])

        return hook

    methods = {name: note(name) for name in HOOKS if "_batch_" not in name[:9]}
    methods["set_params"] = lambda self, p: calls.append(["params", [p["steps"]], []])

    def set_model(self, model):
        keras.callbacks.Callback.set_model(self, model)
        calls.append(["model", [], []])

    methods["set_model"] = set_model
    return type("Recorder", (keras.callbacks.Callback,), methods)()


def recorded():
    wrapped, bare = [], []
    callbacks = [RankZeroOnly(recorder(wrapped)), recorder(bare)]
    model, x, y = model_and_data()
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=(x[:4], y[:4]),
        callbacks=callbacks,
    )
    model.evaluate(x, y, verbose=0, callbacks=callbacks)
    model.predict(x, verbose=0, callbacks=callbacks)
    assert {name for name, _, _ in bare} == {
        *(n for n in HOOKS if "_batch_" not in n[:9]),
        "params",
        "model",
    }
    return [wrapped == bare, len(wrapped)]


def test_every_hook_is_forwarded_on_rank_0_and_none_elsewhere():
    ranks = run_ranks(recorded, 2)
    assert ranks[0] == [True, 40]
    assert ranks[1] == [False, 0]


class Summary:
    """TensorBoard's summaries, where TensorBoard is not installed: lines of a file."""

    def __init__(self, folder):
        self.folder = folder

    def create_file_writer(self, folder):
        os.makedirs(folder, exist_ok=True)
        return tf.summary.create_noop_writer()

    def __getattr__(self, name):
        return getattr(tf.summary, name)

    def scalar(self, name, value, step=None):
        with open(os.path.join(self.folder, "scalars"), "a") as file:
            file.write(f"{name} {float(value)}\n")


def written(folder):
    k = keras.callbacks
    old = k.TensorBoard.summary
    k.TensorBoard.summary = property(lambda self: Summary(self.log_dir))
    try:
        model = fit(
            [
                tfdist.callbacks.MetricAverage(),
                RankZeroOnly(k.CSVLogger(os.path.join(folder, "log.csv"))),
                RankZeroOnly(
                    k.TensorBoard(os.path.join(folder, "board"), write_graph=False)
                ),
                RankZeroOnly(
                    k.ModelCheckpoint(os.path.join(folder, "m-{epoch}.keras"))
                ),
                RankZeroOnly(
                    k.ModelCheckpoint(
                        os.path.join(folder, "b-{batch}.weights.h5"),
                        save_freq=2,
                        save_weights_only=True,
                    )
                ),
            ]
        )
    finally:
        k.TensorBoard.summary = old
    losses = model.history.history["loss"]
    return [losses, sorted(os.listdir(folder)), everything(model)]


def test_what_writes_files_writes_them_once_with_the_metrics_of_all(tmp_path):
    ranks = run_ranks(written, 2, str(tmp_path))
    same_on_all([weights for _, _, weights in ranks])
    losses, files, _ = ranks[0]
    assert ranks[1][0] == losses
    with open(tmp_path / "log.csv") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == losses
    scalars = (tmp_path / "board" / "scalars").read_text().splitlines()
    assert [
        float(line.split()[1]) for line in scalars if line.startswith("epoch_loss ")
    ] == losses
    by_step = ["b-1.weights.h5", "b-2.weights.h5", "b-3.weights.h5"]
    assert files == [*by_step, "board", "log.csv", "m-1.keras", "m-2.keras"]
    loaded = keras.models.load_model(tmp_path / "m-2.keras")
    for a, b in zip(loaded.weights, ranks[0][2], strict=False):
        np.testing.assert_array_equal(a, b)


class Decides(keras.callbacks.Callback):
    """Changes everything that a callback may change, in the hooks where it may."""

    def on_train_begin(self, logs=None):
        self.model._initial_epoch = 1

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.5 / (epoch + 1)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            self.model.layers[0].bias.assign([7.0])
            self.model.optimizer.variables[2].assign([[5.0], [6.0]])
        if epoch == 3:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.model.layers[0].kernel.assign([[1.5], [2.5]])


def decided():
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(
            [epoch, float(watch.model.optimizer.learning_rate)]
        )
    )
    callback = Decides()
    model = fit([RankZeroOnly(callback), watch], epochs=9)
    np.testing.assert_array_equal(model.layers[0].kernel, [[1.5], [2.5]])
    return [np.array(seen), *everything(model)]


def test_decisions_of_rank_0_reach_all_ranks():
    ranks = run_ranks(decided, 2)
    same_on_all(ranks)
    expected = [[1, 0.25], [2, np.float32(0.5 / 3)], [3, 0.125]]
    np.testing.assert_array_equal(ranks[0][0], expected)


class DecidesForTwo(keras.callbacks.Callback):
    """Changes rate and slots of an optimizer that `compile` was not given."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.other.learning_rate = 0.125
        self.model.other.variables[-1].assign([7.0])


def decided_for_two(built):
    model, x, y = model_and_data()
    head = keras.Variable([1.0], name="head")
    model.other = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
    if built:
        model.other.build([head])
        callback = DecidesForTwo()
    else:
        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: model.other.build([head])
        )
    try:
        model.fit(x, y, epochs=1, verbose=0, callbacks=[RankZeroOnly(callback)])
    except (RuntimeError, tfdist.RankFailedError) as error:
        return str(error)
    return [float(model.other.learning_rate), model.other.variables[-1].numpy()[0]]


def test_decisions_about_another_optimizer_reach_all_ranks_too():
    assert run_ranks(decided_for_two, 2, True) == [[0.125, 7.0]] * 2


@pytest.mark.slow
def test_another_optimizer_has_to_be_built_on_all_ranks():
    for message in run_ranks(decided_for_two, 2, False):
        assert "Build it on every rank before fit" in message


def kerass_decisions():
    """EarlyStopping and the rates decided on rank 0's own metrics."""
    k = keras.callbacks
    model = fit(
        [
            RankZeroOnly(
                k.EarlyStopping("loss", min_delta=1, restore_best_weights=True)
            ),
            RankZeroOnly(k.ReduceLROnPlateau("loss", patience=0, factor=0.5)),
            RankZeroOnly(k.LearningRateScheduler(lambda epoch, rate: rate * 0.75)),
        ],
        epochs=9,
    )
    return [np.array(model.history.epoch), *everything(model)]


@pytest.mark.slow
def test_keras_callbacks_that_decide_may_do_so_on_rank_0():
    ranks = run_ranks(kerass_decisions, 2)
    same_on_all(ranks)
    assert len(ranks[0][0]) < 9


def stopped_at_a_step():
    steps = []

    class Stop(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):  # the old name
            if batch == 1:
                self.model.stop_training = True

    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    fit([RankZeroOnly(Stop()), count, StopTogether()])
    return steps


def test_a_stop_at_a_step_of_rank_0_stops_all_with_stop_together():
    assert run_ranks(stopped_at_a_step, 2) == [[0, 1]] * 2


# ---- failures


class Fails(keras.callbacks.Callback):
    """Does something that it must not, in the second epoch."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def on_epoch_begin(self, epoch, logs=None):
        self.late = epoch == 1
        if self.late and self.what == "schedule":
            self.model.optimizer._learning_rate = (
                keras.optimizers.schedules.CosineDecay(0.5, 10)
            )

    def on_train_batch_end(self, batch, logs=None):
        if not self.late or batch:
            return
        if self.what == "stop":
            self.model.stop_training = True
        elif self.what == "rate":
            self.model.optimizer.learning_rate = 0.125
        elif self.what == "weights":
            self.model.layers[0].bias.assign([7.0])
        elif self.what == "raises in a step":
            raise OSError(28, "No space left on device")

    def on_epoch_end(self, epoch, logs=None):
        if self.late and self.what == "raises":
            raise OSError(28, "No space left on device")


def failing(what):
    began = time.monotonic()
    try:
        fit([RankZeroOnly(Fails(what))], epochs=3)
    except (OSError, RuntimeError, tfdist.RankFailedError) as error:
        text = f"{type(error).__name__}: {error}"
    except tf.errors.OpError as error:
        known = tfdist.errors.from_tf(error)
        text = f"{type(known).__name__}: {known.record.rank}: {known.record.cause}"
    together = what in ("raises", "schedule")
    later = tfdist.allgather_object(1) if together else []
    return [text, time.monotonic() - began, later]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raises", "No space left on device"),
        ("rate", "changed the learning rate on rank 0 only"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("raises in a step", "No space left on device"),
                ("schedule", "replaced the learning rate"),
                ("stop", "StopTogether() at the end"),
                ("weights", "changed the model's or the optimizer's variables"),
            ]
        ),
    ],
)
def test_a_failure_on_rank_0_ends_all_at_once(what, words):
    ranks = run_ranks(failing, 2, what, env={"TFDIST_TIMEOUT_S": "60"}, timeout_s=50)
    kind = "OSError" if "raises" in what else "RuntimeError"
    assert ranks[0][0].startswith(kind)
    assert ranks[1][0].startswith("RankFailedError")
    for text, seconds, later in ranks:
        assert words in text
        assert seconds < 30  # not at the deadline
        assert later == ([1, 1] if what in ("raises", "schedule") else [])


def slow_callback():
    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            end = time.monotonic() + 3
            while native.failure() is None and time.monotonic() < end:
                time.sleep(0.05)

    try:
        fit([RankZeroOnly(Slow(), timeout_s=0.5)], epochs=1)
    except tfdist.TimeoutError as error:
        return str(error)
    return ""


@pytest.mark.slow  # for Checkpoint: test_callbacks_ranks.py
def test_the_others_wait_for_the_callback_with_a_deadline():
    assert (
        "RankZeroOnly, what rank 0 has changed"
        in run_ranks(slow_callback, 2, timeout_s=40)[1]
    )


def unlike_callbacks():
    wrapped = [Decides(), Fails("nothing")][tfdist.rank()]
    try:
        fit([RankZeroOnly(wrapped)])
    except tfdist.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_wrap_different_callbacks_are_told_so():
    for message in run_ranks(unlike_callbacks, 2):
        assert "RankZeroOnly(Decides)" in message
        assert "RankZeroOnly(Fails)" in message
