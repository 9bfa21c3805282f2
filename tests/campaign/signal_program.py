"""A training whose start, tracing, steps, validation and saves take their time.

One rank of a trial of `signals`. In the folder of the trial a file `PHASE-RANK-COUNT`
appears when a phase begins the COUNT-th time, and `steps-RANK` has a line with the
number of updates and a hash of the weights for each step that is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

STEPS, TESTS, BATCH = 15, 12, 4  # of an epoch, of a validation; samples
STEP_S, TEST_S = 0.02, 0.05
TRACING_S, SAVE_S, START_S = 0.5, 0.4, 0.3
EPOCHS = 1000  # never done

_counts: Counter[str] = Counter()


def mark(phase: str) -> None:
    """Makes the file that marks the start of a phase, once `fit` has begun."""
    if phase == "start" or _counts["start"]:
        _counts[phase] += 1
        Path(f"{phase}-{tfdist.rank()}-{_counts[phase]}").touch()


@keras.saving.register_keras_serializable("signals")
class Slow(keras.layers.Layer):
    """Takes long to trace, and to save."""

    def call(self, x: Any) -> Any:
        """Marks and delays tracing; traced calls are not delayed."""
        mark("tracing")
        time.sleep(TRACING_S)
        return x

    def get_config(self) -> dict[str, Any]:
        """Marks and delays a save, which calls this."""
        mark("save")
        time.sleep(SAVE_S)
        return dict(super().get_config())


def digest(model: keras.Model) -> str:
    """Hash of the weights."""
    found = hashlib.blake2b(digest_size=8)
    for weight in model.weights:
        found.update(keras.ops.convert_to_numpy(weight).tobytes())
    return found.hexdigest()


class Watch(keras.callbacks.Callback):
    """Marks the phases, writes down what is done."""

    def on_train_begin(self, logs: Any = None) -> None:
        """The initial state counts as step 0."""
        self.write()
        time.sleep(START_S)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step is done."""
        self.write()
        mark("steps")

    def on_test_begin(self, logs: Any = None) -> None:
        """The validation begins."""
        mark("validation")

    def write(self) -> None:
        """One line, in one write."""
        line = f"{int(self.model.optimizer.iterations)} {digest(self.model)}\n"
        with open(f"steps-{tfdist.rank()}", "a") as file:
            file.write(line)


class Listens(keras.callbacks.Callback):
    """Marks that the callbacks before this one have a model."""

    def set_model(self, model: keras.Model) -> None:
        """`fit` has begun."""
        super().set_model(model)
        mark("start")


class Logged(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self.lines.append(record.getMessage())


def batches(count: int, pause_s: float) -> tf.data.Dataset:
    """Random batches, each after a pause."""
    generator = np.random.default_rng(tfdist.rank())

    def make() -> Any:
        for _ in range(count):
            time.sleep(pause_s)
            x = generator.normal(size=(BATCH, 8)).astype("float32")
            yield x, x[:, :1]

    shapes = (tf.TensorSpec((BATCH, 8)), tf.TensorSpec((BATCH, 1)))
    return tf.data.Dataset.from_generator(make, output_signature=shapes)


def train(folder: str) -> list[Any]:
    """Trains on one rank until a signal comes.

    Args:
        folder: where the marks and checkpoints go.

    Returns:
        The exit code, and what tfdist has logged.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), Slow(), keras.layers.Dense(1)])
    adam = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(adam, "mse", jit_compile=False)
    checkpoint = tfdist.callbacks.Checkpoint("checkpoint-{step}.keras", keep=2)
    logged = Logged()
    with contextlib.chdir(folder):
        Path(f"pid-{tfdist.rank()}").write_text(str(os.getpid()))
        _counts.clear()
        logging.getLogger("tfdist").addHandler(logged)
        try:
            model.fit(
                batches(STEPS * EPOCHS, STEP_S),
                steps_per_epoch=STEPS,
                epochs=EPOCHS,
                validation_data=batches(TESTS + tfdist.rank(), TEST_S),
                verbose=0,
                shuffle=False,
                callbacks=[
                    tfdist.callbacks.BroadcastInitialState(),
                    Watch(),  # before the ranks may save and leave
                    tfdist.callbacks.MetricAverage(),
                    checkpoint,
                    tfdist.callbacks.StopOnSignal(checkpoint),
                    Listens(),
                ],
            )
        except SystemExit as exit:
            return [exit.code, logged.lines]
        finally:
            logging.getLogger("tfdist").removeHandler(logged)
            _counts.clear()
    return ["went on", logged.lines]
