"""Measures the time of this rank's own work in training steps, and exchanges it."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tfdist.collectives import ReduceOp, allreduce
from tfdist.core import native, runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.core.timeline.stragglers import Times


class OwnWork:
    """Measures the time in training steps, and this rank's own work in that time."""

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None  # None: paused
        self._elapsed_s = self._work_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the clock runs."""
        return self._since is not None

    def resume(self) -> None:
        """Starts the clock, if it is paused."""
        if self._since is None:
            self._since = _now()

    def pause(self) -> None:
        """Stops the clock, if it runs."""
        if self._since is None:
            return
        now_s, blocked_s = _now()
        elapsed_s = now_s - self._since[0]
        self._elapsed_s += elapsed_s
        self._work_s += max(0.0, elapsed_s - (blocked_s - self._since[1]))
        self._since = None

    def reset(self) -> None:
        """Stops the clock, and sets it to zero."""
        self._since = None
        self._elapsed_s = self._work_s = 0.0

    def take(self, samples: float) -> Times:
        """Returns the time that was measured, and sets the clock to zero.

        Args:
            samples: samples of this rank in a step.
        """
        was_running = self.is_running
        self.pause()
        found = Times(self._elapsed_s, self._work_s, samples)
        self._elapsed_s = self._work_s = 0.0
        if was_running:
            self.resume()
        return found


def exchange(own: Times, process_set: ProcessSet | None) -> dict[int, Times]:
    """Returns the times of all ranks that train; ranks without data are missing.

    An allreduce is used because, unlike other operations, it works in the steps of an
    elastic loop, where the loss of a rank is hidden until the end of the step.

    Args:
        own: the times of this rank.
        process_set: the ranks that train together; None for all.
    """
    members = list(members_of(process_set))
    if len(members) == 1:
        return {members[0]: own}
    table = np.zeros([len(members), 3])
    row = members.index(runtime.rank())
    table[row] = own.elapsed_s, own.work_s, own.samples
    table = allreduce(
        tf.constant(table),
        op=ReduceOp.SUM,
        name="Stragglers",
        process_set=process_set,
    ).numpy()
    return {
        rank: Times(*map(float, row))
        for rank, row in zip(members, table, strict=True)
        if row[2] > 0
    }


def _now() -> tuple[float, float]:
    """Returns the time, and for how long operations have blocked this rank so far."""
    return time.monotonic(), native.counters()["blocked_us"] / 1e6
