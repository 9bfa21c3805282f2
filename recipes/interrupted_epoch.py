"""One line in the log for an epoch that was interrupted and completed by another run.

A checkpoint in the middle of an epoch comes with a `Part`: metrics and times up to
there. The run that goes on adds its own, so that the line is about all steps of the
epoch. Parts are in interrupted.yaml in the run's folder, by the number of steps.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import run_folder

import tfdist

PARTS = "interrupted.yaml"


class Part(NamedTuple):
    """Measurements of the first steps of an epoch.

    Attributes:
        sums: states of the metrics by name, added over all ranks. The metrics are
            means, whose states are a sum and a count.
        batches: how many batches were timed.
        timed_s: how long they took.
        epoch_s: seconds since the epoch began.
    """

    sums: dict[str, float]
    batches: int
    timed_s: float
    epoch_s: float


def save_part(folder: Path, steps: int, part: Part) -> None:
    """Adds the part of an epoch up to a step; forgets those without a checkpoint.

    Args:
        folder: of the run.
        steps: number of steps that were done.
        part: what was measured.
    """
    file = folder / PARTS
    parts = run_folder.read(file) if file.is_file() else {}
    saved = map(run_folder.steps_of, run_folder.checkpoints(folder, whole=True))
    kept = {str(step): parts[str(step)] for step in saved if str(step) in parts}
    run_folder.save(folder, {**kept, str(steps): part._asdict()}, PARTS)


def load_part(folder: Path, steps: int) -> Part | None:
    """The part of an epoch up to a step; None if there is none.

    All ranks call it, rank 0 reads the file.

    Args:
        folder: of the run.
        steps: number of steps that were done.
    """
    file, found = folder / PARTS, None
    if tfdist.rank() == 0 and file.is_file():
        found = run_folder.read(file).get(str(steps))
    found = tfdist.broadcast_object(found)
    return Part(**found) if found else None


def samples_per_s(
    earlier: Part | None, batches: int, per_s: float, images: int
) -> float:
    """Images per second of a whole epoch.

    Args:
        earlier: what was measured before the interruption, if that is known.
        batches: how many batches were timed since.
        per_s: images per second of those.
        images: images of all ranks in a batch.

    Returns:
        Images per second of the timed batches of both runs; NaN if there are none.
    """
    before, before_s = (earlier.batches, earlier.timed_s) if earlier else (0, 0.0)
    seconds = before_s + (batches * images / per_s if batches else 0.0)
    return (before + batches) * images / seconds if before + batches else math.nan


class WholeEpoch(keras.callbacks.Callback):
    """Makes the metrics and times of a resumed epoch those of all its steps.

    Put it before `MetricAverage`, and `complete` in a callback after `Progress`.

    Args:
        earlier: the part of the epoch before the interruption; None if there is none
            or it is not known.
        resumed: whether the first epoch begins in its middle.
        images: images of all ranks in a batch.
    """

    def __init__(self, earlier: Part | None, *, resumed: bool, images: int) -> None:
        super().__init__()
        self._earlier, self._resumed, self._images = earlier, resumed, images
        self._begun = False
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Only the first epoch of a run goes on with an earlier one."""
        if self._begun:
            self._earlier, self._resumed = None, False
        self._begun = True
        self._batches = 0
        self._began_s = self._first_s = self._last_s = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Adds the earlier metrics after the first batch, which makes the states."""
        self._batches += 1
        self._last_s = time.monotonic()
        if self._batches > 1:
            return
        self._first_s = self._last_s
        if self._earlier and tfdist.rank() == 0:  # the sum over the ranks counts
            for name, state in self._states():
                state.assign_add(self._earlier.sums.get(name, 0.0))

    def part(self) -> Part | None:
        """The measurements of this epoch so far; all ranks have to call it."""
        if not self._batches:
            return self._earlier
        states = self._states()
        own = np.array([float(state) for _, state in states])
        sums = tfdist.allreduce(
            own, op=tfdist.ReduceOp.SUM, name="metrics of the interrupted epoch"
        )
        before = self._earlier or Part({}, 0, 0.0, 0.0)
        return Part(
            sums={
                name: float(value)
                for (name, _), value in zip(states, sums.numpy(), strict=True)
            },
            batches=before.batches + self._batches - 1,
            timed_s=before.timed_s + self._last_s - self._first_s,
            epoch_s=before.epoch_s + self._last_s - self._began_s,
        )

    def complete(self, epoch: int, logs: dict[str, float]) -> None:
        """`on_epoch_end` after `Progress`: the numbers of both runs together."""
        if not self._resumed:
            return
        logs["samples_per_s"] = samples_per_s(
            self._earlier, self._batches - 1, logs["samples_per_s"], self._images
        )
        logs["epoch_s"] += self._earlier.epoch_s if self._earlier else 0.0

    def _states(self) -> list[tuple[str, Any]]:
        """Name and variable of each state of the metrics."""
        return [(v.path, v) for metric in self.model.metrics for v in metric.variables]
