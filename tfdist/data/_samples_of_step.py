"""samples_of_step: the samples of one step, for custom loops that count their steps."""

from __future__ import annotations

import numpy as np

from tfdist.data._batch_schedule import BatchSchedule, schedule_of
from tfdist.data._epoch_order import check_int, latest_order, rank_and_size


def samples_of_step(
    total: int,
    *,
    global_batch: int | BatchSchedule,
    seed: int,
    step: int,
    rank: int | None = None,
    size: int | None = None,
) -> np.ndarray:
    """Returns the indices of the samples that one rank uses in one step.

    Steps are counted over all epochs: step t is step `t % steps` of epoch `t // steps`,
    with `steps = total // global_batch`. It uses the same samples as with `positions`.
    With a `BatchSchedule`, epochs have different numbers of steps.

    Unlike with `positions`, the global batch need not be a multiple of the number of
    ranks. The ranks' parts of a step then differ by one sample, and the lowest ranks
    have the larger parts. In this case, pass the number of samples as `weight` to
    `tape.gradient`, so that all samples count equally.

    Use it in a loop over `tfdist.elastic.State.steps`, where the number of ranks may
    change from one step to the next: the samples of a step stay the same.

    Args:
        total: number of samples, at least `global_batch`.
        global_batch: number of samples per step on all ranks together, at least `size`;
            or a `tfdist.data.BatchSchedule`.
        seed: the run's seed, 0..2**64 - 1.
        step: number of the step, counted from 0 over all epochs.
        rank: the rank that uses the samples; default `tfdist.rank()`.
        size: number of ranks; default `tfdist.size()`.

    Returns:
        int64 array of shape `[global_batch // size]` or `[global_batch // size + 1]`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: a global batch is larger than `total` or smaller than `size`, or an
            argument is out of range.

    Example:
        >>> from tfdist.data import samples_of_step
        >>> [samples_of_step(7, global_batch=3, seed=1, step=2, rank=r, size=2).tolist()
        ...  for r in range(2)]
        [[0, 6], [5]]
    """
    rank, size = rank_and_size(rank, size)
    total, step = check_int("total", total, 0), check_int("step", step, 0)
    schedule = schedule_of(global_batch)
    for batch in schedule.batches.values():
        if not size <= batch <= total:
            raise ValueError(
                f"Expected a global_batch of {size} (the number of ranks) to {total} "
                f"(the number of samples), got {batch}."
            )
    epoch, number = schedule.place_of(step, total=total)
    batch = schedule.batch_of(epoch)
    order = latest_order(total, check_int("seed", seed, 0), epoch)
    own = order[number * batch : (number + 1) * batch]
    return np.array_split(own, size)[rank].copy()  # `order` is read-only
