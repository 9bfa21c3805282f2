"""BatchSchedule: a global batch size that changes during training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tfdist.data._epoch_order import check_int


class BatchSchedule:
    """A schedule of the global batch size, which may change at certain epochs.

    Multiplying the batch size by k reduces the noise in training as much as dividing
    the learning rate by k, and an epoch then has only 1/k of the steps. So where a
    schedule would divide the learning rate, multiply the batch size instead.

    Pass the schedule as `global_batch` to `tfdist.data.global_batches` or
    `tfdist.data.samples_of_step`. The order of the samples in an epoch does not depend
    on the batch size, so each sample is used at most once per epoch. Samples at the end
    of an epoch that do not fill a step are skipped.

    Args:
        batches: dict that maps an epoch, counted from 0, to the global batch size from
            that epoch on. Epoch 0 is required.

    Attributes:
        batches: the same dict, sorted by epoch.

    Raises:
        TypeError: `batches` is not a mapping of integers to integers.
        ValueError: epoch 0 is missing, an epoch is negative, or a batch size is below
            1.

    Example:
        >>> from tfdist.data import BatchSchedule
        >>> growing = BatchSchedule({0: 32, 30: 160, 60: 800})
        >>> [growing.batch_of(epoch) for epoch in (0, 29, 30, 80)]
        [32, 32, 160, 800]
        >>> growing.steps_before(30, total=16000), growing.steps_before(31, total=16000)
        (15000, 15100)

    References:
        Smith, Kindermans, Ying & Le, Don't Decay the Learning Rate, Increase the Batch
        Size, ICLR 2018, section 3 (arXiv:1711.00489).
    """

    def __init__(self, batches: Mapping[int, int]) -> None:
        if not isinstance(batches, Mapping):
            raise TypeError(
                "batches: expected a dict from epochs to global batches, got "
                f"{type(batches).__name__} {batches!r}."
            )
        checked = {
            check_int("epoch", epoch, 0): check_int("global_batch", batch, 1)
            for epoch, batch in batches.items()
        }
        if 0 not in checked:
            raise ValueError(
                f"batches: expected a global batch for epoch 0, got {dict(batches)}."
            )
        self.batches = dict(sorted(checked.items()))

    def __repr__(self) -> str:
        return f"BatchSchedule({self.batches})"

    def batch_of(self, epoch: int) -> int:
        """Returns the global batch size of an epoch.

        Args:
            epoch: number of the epoch, counted from 0.
        """
        epoch = check_int("epoch", epoch, 0)
        return self.batches[max(begin for begin in self.batches if begin <= epoch)]

    def steps_before(self, epoch: int, *, total: int) -> int:
        """Returns the total number of steps in the epochs before `epoch`.

        Use it to set the boundaries of a learning-rate schedule.

        Args:
            epoch: number of the epoch, counted from 0.
            total: number of samples in an epoch.
        """
        begins = [begin for begin in self.batches if begin < epoch]
        return sum(
            (end - begin) * (total // self.batches[begin])
            for begin, end in itertools.pairwise([*begins, epoch])
        )

    def place_of(self, step: int, *, total: int) -> tuple[int, int]:
        """Returns the epoch of a step, and the index of the step in that epoch.

        Args:
            step: number of the step, counted from 0 over all epochs.
            total: number of samples in an epoch, at least the largest batch size.

        Raises:
            ValueError: `total` is less than the largest batch size.
        """
        self.check_total(total)
        last = max(
            begin
            for begin in self.batches
            if self.steps_before(begin, total=total) <= step
        )
        steps = total // self.batches[last]
        epochs, left = divmod(step - self.steps_before(last, total=total), steps)
        return last + epochs, left

    def check_total(self, total: int) -> None:
        """Raises a ValueError if there are fewer samples than in the largest batch."""
        largest = max(self.batches.values())
        if total < largest:
            raise ValueError(
                f"Expected enough samples for one step, got {total} samples for a "
                f"global_batch of {largest}."
            )


def schedule_of(global_batch: int | BatchSchedule) -> BatchSchedule:
    """Converts a global batch to a schedule; a number is used in all epochs."""
    if isinstance(global_batch, BatchSchedule):
        return global_batch
    return BatchSchedule({0: check_int("global_batch", global_batch, 1)})
