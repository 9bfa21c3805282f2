"""The batches of an elastic loop with a constant per-rank batch."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.rendezvous import renewal
from tfdist.data._epoch_order import check_int, latest_order, step_at


class PerRankBatches:
    """The samples of this rank in each step, and the number of samples used so far.

    Args:
        total: number of samples.
        batch: number of samples of one rank in a step.
        epochs: number of passes over the samples.
        seed: seed of the order of the samples.
        start: number of samples, over all epochs, that an earlier job has used.

    Attributes:
        variable: number of samples, over all epochs, that have been used or skipped up
            to and including the latest step.
        committed: value of `variable` at the last commit.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is out of range, or there are too few samples for a
            step.
    """

    def __init__(
        self, total: int, *, batch: int, epochs: int, seed: int, start: int
    ) -> None:
        self._total = check_int("total", total, 1)
        self._batch = check_int("per_rank_batch", batch, 1)
        self._seed = check_int("seed", seed, 0)
        self._end = check_int("epochs", epochs, 0) * self._total
        self.committed = check_int("start", start, 0)
        most = runtime.size()
        if renewal.is_elastic(os.environ):
            most = renewal.largest_size(os.environ)
        if self._total < most * self._batch:
            raise ValueError(
                f"Expected enough samples for one step, got {self._total} samples for "
                f"a per_rank_batch of {self._batch} and up to {most} ranks."
            )
        if self.committed > self._end:
            raise ValueError(
                f"Expected start to be in 0..{self._end}, the number of samples in "
                f"{epochs} epochs, got {start}."
            )
        self.variable = tf.Variable(start, dtype=tf.int64, trainable=False)

    def describe(self) -> str:
        """Describes what has to be equal on all ranks."""
        return f"{self._end} of {self._total} samples in batches of {self._batch}"

    def has_next(self) -> bool:
        """Returns whether a step follows the latest step."""
        return int(self.variable) < self._end

    def is_over(self) -> bool:
        """Returns whether no step follows the last commit."""
        return self.committed >= self._end

    def begin_step(self) -> np.ndarray:
        """Begins the next step; returns the indices of this rank's samples."""
        size = runtime.size()
        epoch, first, after = step_at(
            self._total, position=int(self.variable), batch=self._batch * size
        )
        # The last step may have taken samples of one more epoch.
        self.variable.assign(min(after, self._end))
        order = latest_order(self._total, self._seed, epoch)
        begin = first + runtime.rank() * self._batch
        return order[begin : begin + self._batch].copy()  # `order` is read-only

    def note_commit(self) -> None:
        """Records that a step was committed, or that a committed state was received."""
        self.committed = int(self.variable)
