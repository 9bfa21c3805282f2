"""Progress: one line about all ranks, and the same two numbers in all their logs."""

import csv
import io
import statistics
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import RankError, run_ranks

import tfdist
from tfdist.callbacks import MetricAverage, Progress, RankZeroOnly, UnevenData
from tfdist.core import native

BATCH, STEPS, EPOCHS = 8, 6, 5
GLOBAL = 2 * BATCH
LATE_S = 0.03
EXPOSED = "exposed_communication"


def build_model(optimizer=None, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    model.compile(
        tfdist.DistributedOptimizer(optimizer), "mse", jit_compile=False, **options
    )
    return model


def samples(steps=STEPS):
    rng = np.random.default_rng(tfdist.rank())
    x = rng.normal(size=(steps * BATCH, 4)).astype("float32")
    return x, x[:, :1]


class Clock(keras.callbacks.Callback):
    """Time of the steps of each epoch but the first of all, on its own."""

    def on_train_begin(self, logs=None):
        self.steps_s, self.count = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.count.append(0)

    def on_train_batch_begin(self, batch, logs=None):
        if self.count[-1] == 0:
            self.began_s = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.count[-1] += 1
        self.ended_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.steps_s.append(self.ended_s - self.began_s)


def fitted(path):
    x, y = samples()
    model, shown, clock = build_model(), io.StringIO(), Clock()
    history = model.fit(
        *(x, y),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x[:16], y[:16]),
        callbacks=[
            MetricAverage(),
            Progress(GLOBAL, unit="rows", file=shown),
            RankZeroOnly(keras.callbacks.CSVLogger(path)),
            RankZeroOnly(keras.callbacks.TensorBoard(path + "-board")),
            clock,
        ],
    ).history
    own = [GLOBAL * STEPS / seconds for seconds in clock.steps_s]
    return [shown.getvalue(), history, own]


def test_the_line_the_logs_and_the_files_tell_the_same(tmp_path):
    path = str(tmp_path / "log.csv")
    (shown, history, own), (silent, other, _) = run_ranks(fitted, 2, path)
    assert silent == ""
    assert history == other
    assert [line[:9] for line in shown.splitlines()] == [
        f"epoch {n}/{EPOCHS}" for n in range(1, EPOCHS + 1)
    ]
    for line, speed, share in zip(
        *(shown.splitlines(), history["samples_per_s"], history[EXPOSED]), strict=True
    ):
        assert f"{speed:.0f} rows/s" in line
        assert f"exposed comm. {share:.0%}" in line
        assert 0 < share < 1
    # Of the first epoch a step is not counted here. Others may stop a test for a while.
    ratios = [a / b for a, b in zip(history["samples_per_s"], own, strict=True)][1:]
    assert 0.5 < statistics.median(ratios) < 2
    assert "ETA" in shown.splitlines()[1] and "ETA" not in shown.splitlines()[-1]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for name in ("samples_per_s", "exposed_communication", "val_loss"):
        assert [float(row[name]) for row in rows] == history[name]
    [board] = (tmp_path / "log.csv-board" / "train").glob("events*")
    records = tf.data.TFRecordDataset(str(board))
    text = b"".join(record.numpy() for record in records)
    assert b"epoch_samples_per_s" in text and b"epoch_exposed_communication" in text


def stopped_and_resumed(path, steps):
    """An epoch of so many steps; the rest of it, if there is only one left."""
    x, y = samples(steps)
    shown = io.StringIO()
    callbacks = [
        MetricAverage(),
        Progress(GLOBAL, file=shown),
        RankZeroOnly(keras.callbacks.CSVLogger(path, append=True)),
    ]
    build_model().fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    return shown.getvalue()


def test_a_file_that_goes_on_keeps_its_columns(tmp_path):
    path = str(tmp_path / "log.csv")
    shown = [
        run_ranks(stopped_and_resumed, ranks, path, steps)[0]
        for ranks, steps in ((1, 6), (2, 6), (2, 1), (1, 1))
    ]
    assert "nan" not in "".join(shown)
    with open(path) as file:
        alone, together, rest, _ = rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows)
    assert (alone["slowest_rank"], alone["waited_for_slowest"]) == ("0", "0.0")
    assert together["slowest_rank"] in "01" and float(together[EXPOSED]) > 0
    assert rest[EXPOSED] == rest["slowest_rank"] == rest["waited_for_slowest"] == "nan"
    assert float(rest["samples_per_s"]) > 0


class Late(keras.callbacks.Callback):
    """Rank 1 comes late to every step."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(LATE_S * tfdist.rank())


def waited():
    x, y = samples(10)
    progress = Progress(GLOBAL, file=io.StringIO())
    history = build_model().fit(
        *(x, y), batch_size=BATCH, verbose=0, callbacks=[progress, Late()]
    )
    return [progress._window.recent.exposed, history.history[EXPOSED][0]]


def test_waiting_for_a_rank_that_is_late_is_exposed():
    (waits, told), (late, also_told) = run_ranks(waited, 2)
    assert waits > 0.5  # nearly all of a step
    assert late < waits / 2
    assert told == also_told and late < told < waits


def waited_s():
    return native.counters()["waited_us"] / 1e6


class Saves(keras.callbacks.Callback):
    """Rank 0 is late at the end of an epoch, and the other one waits for it there."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(LATE_S)  # on both ranks: the steps take longer than they wait

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(10 * LATE_S * (tfdist.rank() == 0))
        tfdist.barrier()


def waited_between_epochs():
    """The numbers of the second epoch, and at most how long its steps have waited."""
    begins_s, ends_s = [], []
    history = (
        build_model()
        .fit(
            *samples(),
            batch_size=BATCH,
            epochs=2,
            verbose=0,
            callbacks=[
                Saves(),
                keras.callbacks.LambdaCallback(
                    on_train_batch_begin=lambda _, logs: begins_s.append(waited_s())
                ),
                Progress(GLOBAL, file=io.StringIO()),
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda _, logs: ends_s.append(waited_s())
                ),
            ],
        )
        .history
    )
    steps_s = GLOBAL * STEPS / history["samples_per_s"][1]
    told_s = history["waited_for_slowest"][1] * steps_s
    return [told_s, ends_s[-1] - begins_s[STEPS]]


def test_waiting_between_two_epochs_is_no_waiting_of_their_steps():
    (told_s, saving_s), (also_told_s, waiting_s) = run_ranks(waited_between_epochs, 2)
    assert told_s == also_told_s <= max(saving_s, waiting_s) + 1e-6


def styled(style):
    """Three epochs; rank 1 has half of the data where they are uneven."""
    steps = 8
    inner, model_options, callbacks, batches = None, {}, [], steps
    if style == "accumulation":
        inner = keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)
    elif style == "steps_per_execution":
        model_options = {"steps_per_execution": 3}
    elif style == "uneven":
        callbacks = [UnevenData()]
        batches = steps // (1 + tfdist.rank())
    elif style == "no data":
        callbacks = [UnevenData()]
        batches = steps * (1 - tfdist.rank())
    model = build_model(inner, **model_options)
    x, y = samples(steps)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).take(batches)
    progress = Progress(GLOBAL, file=io.StringIO())
    callbacks += [MetricAverage(), progress]
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks).history
    assert progress._step == batches
    return history


@pytest.mark.parametrize(
    "style",
    [
        pytest.param("accumulation", marks=pytest.mark.slow),
        pytest.param("steps_per_execution", marks=pytest.mark.slow),
        pytest.param("uneven", marks=pytest.mark.slow),
        "no data",
    ],
)
def test_ranks_log_the_same_numbers_however_they_train(style):
    history, other = run_ranks(styled, 2, style)
    assert history == other
    for speed, share, seconds in zip(
        *(history[name] for name in ("samples_per_s", EXPOSED, "epoch_s")), strict=True
    ):
        assert speed > 0 and seconds > 0
        assert 0 < share < 1


def looped(joined=False):
    """A loop of the user's own; the model is not compiled."""
    if joined and tfdist.rank() == 1:
        return tfdist.join()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    logs, shown = {}, io.StringIO()
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, own: logs.update(own))
    progress = Progress(GLOBAL, file=shown)
    callbacks = keras.callbacks.CallbackList(
        [progress, keep], model=model, epochs=1, steps=STEPS
    )

    @tf.function
    def step(x, y):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for number in range(STEPS):
        callbacks.on_train_batch_begin(number)
        loss = step(*(tf.constant(a) for a in samples(1)))
        callbacks.on_train_batch_end(number, {"loss": loss})
    callbacks.on_epoch_end(0, {"loss": loss})
    callbacks.on_train_end()
    if joined:
        tfdist.join()
    return [logs[EXPOSED], logs["samples_per_s"], shown.getvalue()]


def test_a_loop_with_a_tape_has_the_same_line():
    (share, speed, shown), (*others, silent) = run_ranks(looped, 2)
    assert [share, speed] == others and silent == ""
    assert 0 < share < 1 and speed > 0
    assert shown.startswith("epoch 1/1  6 steps in ")
    assert f"exposed comm. {share:.0%}" in shown


def test_a_rank_that_has_joined_is_left_out():
    (share, speed, shown), latest, (*others, silent) = run_ranks(looped, 3, True)
    assert [share, speed] == others and silent == "" and latest == 0
    assert 0 < share < 1 and speed > 0
    assert shown.startswith("epoch 1/1  6 steps in ")


def in_a_set():
    sets = [tfdist.add_process_set([0]), tfdist.add_process_set([1, 2])]
    own = sets[tfdist.rank() > 0]
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer = tfdist.DistributedOptimizer(optimizer, process_set=own)
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = samples()
    shown = io.StringIO()
    progress = Progress(BATCH * own.size(), file=shown)
    history = model.fit(
        *(x, y), batch_size=BATCH, verbose=0, callbacks=[progress]
    ).history
    return [history[EXPOSED][0], history["samples_per_s"][0], shown.getvalue()]


def test_a_process_set_has_a_line_of_its_own():
    alone, first, second = run_ranks(in_a_set, 3)
    assert alone[0] == 0.0 and "exposed" not in alone[2] and "samples/s" in alone[2]
    assert first[:2] == second[:2] and 0 < first[0] < 1
    assert "exposed" in first[2] and second[2] == ""


def other_numbers():
    progress = Progress(GLOBAL + tfdist.rank(), file=io.StringIO())
    x, y = samples()
    build_model().fit(x, y, batch_size=BATCH, verbose=0, callbacks=[progress])


def written_too_early(path):
    callbacks = [
        RankZeroOnly(keras.callbacks.CSVLogger(path)),
        Progress(GLOBAL, file=io.StringIO()),
    ]
    x, y = samples()
    build_model().fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)


def test_lists_that_do_not_go_together_are_refused_on_all_ranks(tmp_path):
    with pytest.raises(RankError, match="global_batch=16.*global_batch=17"):
        run_ranks(other_numbers, 2)
    with pytest.raises(
        RankError, match=r"RankZeroOnly\(CSVLogger\) writes the logs be"
    ):
        run_ranks(written_too_early, 2, str(tmp_path / "log.csv"))
