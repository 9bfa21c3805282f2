"""Logs one line for an epoch that was interrupted and completed after a resume.

For each checkpoint in the middle of an epoch, a `Part` is saved: the metrics and times
so far. The resumed run adds its own values, so that the line covers all steps of the
epoch. The parts are saved in interrupted.yaml in the run's folder, by number of steps.
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
        batches: number of batches that were timed.
        timed_s: duration of these batches.
        epoch_s: seconds since the epoch began.
    """

    sums: dict[str, float]
    batches: int
    timed_s: float
    epoch_s: float


def save_part(folder: Path, steps: int, part: Part) -> None:
    """Adds the part of an epoch up to a step; removes parts of removed checkpoints.

    Args:
        folder: folder of the run.
        steps: number of completed steps.
        part: the measurements.
    """
    file = folder / PARTS
    parts = run_folder.read(file) if file.is_file() else {}
    saved = {*map(run_folder.steps_of, run_folder.checkpoints(folder))}
    newest = max(saved, default=-1)  # files of later steps are still being written
    kept = {
        step: one
        for step, one in parts.items()
        if int(step) in saved or newest < int(step) < steps
    }
    run_folder.save(folder, {**kept, str(steps): part._asdict()}, PARTS)


def load_part(folder: Path, steps: int) -> Part | None:
    """Returns the part of an epoch up to a step; None if it was not saved.

    All ranks must call this function; rank 0 reads the file.

    Args:
        folder: folder of the run.
        steps: number of completed steps.
    """
    file, found = folder / PARTS, None
    if tfdist.rank() == 0 and file.is_file():
        found = run_folder.read(file).get(str(steps))
    found = tfdist.broadcast_object(found)
    return Part(**found) if found else None


def samples_per_s(
    earlier: Part | None, batches: int, per_s: float, images: int
) -> float:
    """Returns the images per second of a whole epoch.

    Args:
        earlier: measurements before the interruption, if they are known.
        batches: number of batches timed after the interruption.
        per_s: images per second of these batches.
        images: images of all ranks in a batch.

    Returns:
        Images per second of the timed batches of both runs; NaN if there are none.
    """
    before, before_s = (earlier.batches, earlier.timed_s) if earlier else (0, 0.0)
    seconds = before_s + (batches * images / per_s if batches else 0.0)
    return (before + batches) * images / seconds if before + batches else math.nan


class WholeEpoch(keras.callbacks.Callback):
    """Extends the metrics and times of a resumed epoch to all its steps.

    Put it before `MetricAverage`, and call `complete` in a callback after `Progress`.

    Args:
        earlier: the part of the epoch before the interruption; None if there is none
            or it is not known.
        resumed: whether the first epoch is the rest of an interrupted epoch.
        images: images of all ranks in a batch.
    """

    def __init__(self, earlier: Part | None, *, resumed: bool, images: int) -> None:
        super().__init__()
        self._earlier, self._resumed, self._images = earlier, resumed, images
        self._begun = False
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Drops the earlier part after the first epoch, to which it belongs."""
        if self._begun:
            self._earlier, self._resumed = None, False
        self._begun = True
        self._batches = 0
        self._began_s = self._first_s = self._last_s = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Adds the earlier metrics after the first batch, which creates the states."""
        self._batches += 1
        self._last_s = time.monotonic()
        if self._batches > 1:
            return
        self._first_s = self._last_s
        if self._earlier and tfdist.rank() == 0:  # states are summed over the ranks
            for name, state in self._states():
                state.assign_add(self._earlier.sums.get(name, 0.0))

    def part(self) -> Part | None:
        """Returns the measurements of this epoch so far; all ranks must call it."""
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
        """Adds the earlier part to the times and the speed that `Progress` logged."""
        if not self._resumed:
            return
        logs["samples_per_s"] = samples_per_s(
            self._earlier, self._batches - 1, logs["samples_per_s"], self._images
        )
        logs["epoch_s"] += self._earlier.epoch_s if self._earlier else 0.0

    def _states(self) -> list[tuple[str, Any]]:
        """Returns the name and variable of each state of the metrics."""
        return [(v.path, v) for metric in self.model.metrics for v in metric.variables]
