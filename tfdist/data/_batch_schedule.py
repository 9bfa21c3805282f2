"""BatchSchedule: global batches that change during a training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tfdist.data._epoch_order import check_int


class BatchSchedule:
    """The global batch of each epoch, for a batch that changes at certain epochs.

    A batch that is k times larger reduces the noise of the gradients as much as a rate
    divided by k, with a k-th of the steps. Where a schedule would divide the rate,
    multiply the batch.

    Use it as `global_batch` of `tfdist.data.global_batches` or
    `tfdist.data.samples_of_step`. The order of the samples in an epoch does not depend
    on the batch, so that each is used at most once in every epoch; those that do not
    fill a step at the end of an epoch are left out.

    Args:
        batches: dict from an epoch, counted from 0, to the global batch that is used
            from this epoch on. Epoch 0 is required.

    Attributes:
        batches: the same dict, sorted by epoch.

    Raises:
        TypeError: `batches` is no mapping, or has anything but integers.
        ValueError: there is none for epoch 0, an epoch is below 0, or a batch below 1.

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
        """Returns the global batch of an epoch.

        Args:
            epoch: counted from 0.
        """
        epoch = check_int("epoch", epoch, 0)
        return self.batches[max(begin for begin in self.batches if begin <= epoch)]

    def steps_before(self, epoch: int, *, total: int) -> int:
        """Returns the number of steps in all epochs before one.

        Use it to set the boundaries of a learning-rate schedule.

        Args:
            epoch: counted from 0.
            total: number of samples in an epoch.
        """
        begins = [begin for begin in self.batches if begin < epoch]
        return sum(
            (end - begin) * (total // self.batches[begin])
            for begin, end in itertools.pairwise([*begins, epoch])
        )

    def place_of(self, step: int, *, total: int) -> tuple[int, int]:
        """Returns the epoch of a step, and its number in the epoch.

        Args:
            step: counted from 0 over all epochs.
            total: number of samples in an epoch, at least the largest batch.

        Raises:
            ValueError: there are fewer samples than in a batch.
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
    """Returns the schedule of a global batch, which may be one for all epochs."""
    if isinstance(global_batch, BatchSchedule):
        return global_batch
    return BatchSchedule({0: check_int("global_batch", global_batch, 1)})
