"""Saves checkpoints without a pause, of a model whose values show their step.

Each element of variable number I is STEP + I / 128 after step STEP, so a file with
values of different steps, or with a wrong bit, is recognized.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist
from tfdist.callbacks import Checkpoint

UNITS = 64
PATTERNS = ("step-{step:08d}.keras", "latest.keras")
_COUNTERS = ("iteration", "learning_rate")


def build() -> keras.Model:
    """A small model with batch normalization, dropout and an optimizer with slots."""
    tfdist.init()
    keras.utils.clear_session()
    layers = keras.layers
    dense = [layers.Dense(UNITS), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((UNITS,)), *dense, layers.Dense(1)])
    adam = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(adam, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def variables_of(model: keras.Model) -> list[Any]:
    """The variables whose values show their step."""
    every = [*model.weights, *model.optimizer.variables]
    return [v for v in every if v.dtype == "float32" and v.name not in _COUNTERS]


def set_step(model: keras.Model, step: int) -> None:
    """Gives all variables the values of a step."""
    model.optimizer.iterations.assign(step)
    for number, variable in enumerate(variables_of(model)):
        variable.assign(np.full(variable.shape, step + number / 128, "float32"))


def wrong_with(model: keras.Model, step: int) -> str:
    """The fault in the variables of a model after a step; "" if there is none."""
    if int(model.optimizer.iterations) != step:
        return f"step {step} was restored, but {int(model.optimizer.iterations)} is set"
    for number, variable in enumerate(variables_of(model)):
        if not np.array_equal(
            np.array(variable), np.full(variable.shape, step + number / 128, "float32")
        ):
            return f"{variable.path} does not have the values of step {step}"
    return ""


def restored(model: keras.Model, path: Path) -> tuple[int, str]:
    """Restores the newest file; returns its step, and the fault in it.

    Args:
        model: the model.
        path: a folder, a pattern or a file.
    """
    set_step(model, 0)
    if path.name.endswith(".h5"):
        model.load_weights(tfdist.newest_checkpoint(path))
        step = int(model.optimizer.iterations)
    else:
        step = tfdist.restore(model, path)
    return step, wrong_with(model, step)


class Announcing(Checkpoint):
    """Writes the step of each complete file to a pipe."""

    def __init__(self, path: Path, pipe: int, **options: Any) -> None:
        super().__init__(path, **options)
        self._pipe = pipe
        self.current = 0

    def on_saved(self, path: Path) -> None:
        """A file is complete."""
        super().on_saved(path)
        numbers = re.findall(r"\d+", path.name)
        step = int(numbers[0]) if numbers else 0
        os.write(self._pipe, f"{step}\n".encode())


def run(folder: str, seed: int, pipe: int) -> None:
    """Continues from the newest checkpoint, and saves until it is killed.

    Args:
        folder: the checkpoints are in it.
        seed: decides how the files are named and written.
        pipe: descriptor of a pipe; "ready", then the steps of complete files.
    """
    draw = random.Random(seed)
    pattern = PATTERNS[seed % 2]
    background = draw.random() < 0.75
    model = build()
    step = 0
    if list(Path(folder).glob("*.keras")):
        step, fault = restored(model, Path(folder))
        if fault:
            os.write(pipe, f"fault: {fault}\n".encode())
            return
    checkpoint = Announcing(
        Path(folder, pattern), pipe, keep=2, background=background, timeout_s=60.0
    )
    checkpoint.set_model(model)
    os.write(pipe, b"ready\n")
    while True:
        step += 1
        set_step(model, step)
        if step % 5 == 0 or not background:
            checkpoint.save_now({}, None)
        if step % 50 == 0:
            checkpoint.wait_until_finished()
