"""Progress: one line about all ranks, and the same two numbers in all their logs."""

import csv
import io
import time

import keras
import numpy as np
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import MetricAverage, Progress, RankZeroOnly

BATCH, STEPS = 8, 6
GLOBAL = 2 * BATCH


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
        epochs=3,
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
        f"epoch {n}/3" for n in (1, 2, 3)
    ]
    for line, speed, measured, share in zip(
        shown.splitlines(),
        history["samples_per_s"],
        own,
        history["exposed_communication"],
        strict=True,
    ):
        assert f"{speed:.0f} rows/s" in line
        assert f"exposed comm. {share:.0%}" in line
        assert 0 < share < 1
        if not line.startswith("epoch 1/"):  # whose first step is not counted here
            assert 0.5 * measured < speed < 2 * measured
    assert "ETA" in shown.splitlines()[1] and "ETA" not in shown.splitlines()[2]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for name in ("samples_per_s", "exposed_communication", "val_loss"):
        assert [float(row[name]) for row in rows] == history[name]
    [board] = (tmp_path / "log.csv-board" / "train").glob("events*")
    records = tf.data.TFRecordDataset(str(board))
    text = b"".join(record.numpy() for record in records)
    assert b"epoch_samples_per_s" in text and b"epoch_exposed_communication" in text
