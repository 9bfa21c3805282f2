"""Order of the samples in an epoch, the same for any number of ranks.

Every step uses the next `global_batch` samples of a permutation that depends only on
the seed and the epoch. The samples of a step are divided between the ranks. An
interrupted run can therefore continue at the same sample with a different number of
ranks. The order is computed with NumPy only.
"""

from __future__ import annotations

import functools
import numbers

import numpy as np

from tfdist.core import runtime

_WORD = 1 << 64


def epoch_order(total: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of the samples, equal on all ranks and NumPy versions.

    The samples are sorted by random 64-bit keys. The key of sample i is the i-th word
    of the counter-based generator Philox4x64-10 with the key (seed, epoch), as returned
    by `numpy.random.Philox(key=[seed, epoch]).random_raw()`. If two keys are equal, the
    sample with the lower index comes first. The words of the generator are defined in
    the paper below. NumPy's shuffling, which may change between versions, is not used.

    Args:
        total: number of samples, at least 0.
        seed: the run's seed, 0..2**64 - 1.
        epoch: number of the epoch, 0..2**64 - 1; every epoch has a different order.

    Returns:
        int64 array of shape `[total]` that contains each index 0..total - 1 once.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is negative or too large.

    Example:
        >>> from tfdist.data import epoch_order
        >>> epoch_order(6, seed=1, epoch=0).tolist()
        [3, 5, 2, 0, 1, 4]

    References:
        Salmon, Moraes, Dror & Shaw, Parallel random numbers: as easy as 1, 2, 3,
        SC11, 2011, section 3.3.
    """
    total = check_int("total", total, 0)
    key = [check_int("seed", seed, 0), check_int("epoch", epoch, 0)]
    keys = np.random.Philox(key=np.array(key, np.uint64)).random_raw(total)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def positions(
    total: int,
    *,
    global_batch: int,
    seed: int,
    epoch: int,
    rank: int | None = None,
    size: int | None = None,
    first_step: int = 0,
) -> np.ndarray:
    """Returns the indices of the samples that one rank reads in each step.

    An epoch has `total // global_batch` steps. Step t uses the samples
    `epoch_order(total, seed, epoch)[t * global_batch:(t + 1) * global_batch]`, and
    rank r reads the r-th of `size` equal parts of these samples. The samples of a step
    are therefore the same for any number of ranks. Each sample is read at most once per
    epoch. The last samples of the order, fewer than one global batch, are skipped; they
    differ from epoch to epoch.

    Args:
        total: number of samples, at least `global_batch`.
        global_batch: number of samples per step on all ranks together; a multiple of
            `size`.
        seed: the run's seed, 0..2**64 - 1.
        epoch: number of the epoch, 0..2**64 - 1.
        rank: the rank that reads; default `tfdist.rank()`.
        size: number of ranks; default `tfdist.size()`.
        first_step: the first step to return, 0..`total // global_batch`; default 0. Use
            it to continue an interrupted run after the steps that it has completed.

    Returns:
        int64 array of shape `[total // global_batch - first_step,
        global_batch // size]`, with one row for each step.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: `global_batch` is not a multiple of `size`, there are fewer samples
            than ranks or than a global batch, or an argument is out of range. The
            message contains valid values.

    Example:
        >>> from tfdist.data import positions
        >>> whole = positions(7, global_batch=2, seed=3, epoch=0, rank=0, size=1)
        >>> [positions(7, global_batch=2, seed=3, epoch=0, rank=r, size=2)
        ...  .ravel().tolist() for r in range(2)] == whole.T.tolist()
        True
    """
    rank, size = rank_and_size(rank, size)
    total = check_int("total", total, 0)
    global_batch = check_int("global_batch", global_batch, 1)
    check_batch(total, global_batch, size)
    steps = total // global_batch
    first_step = check_int("first_step", first_step, 0)
    if first_step > steps:
        raise ValueError(
            f"Expected first_step to be in 0..{steps} (the epoch has {steps} steps "
            f"with {global_batch} of the {total} samples each), got {first_step}."
        )
    order = epoch_order(total, seed=seed, epoch=epoch)
    rows = order[: steps * global_batch].reshape(steps, size, global_batch // size)
    return rows[first_step:, rank]


def step_at(total: int, *, position: int, batch: int) -> tuple[int, int, int]:
    """Returns the next step after a number of samples, if step sizes may differ.

    The samples at the end of an epoch that do not fill a step are skipped.

    Args:
        total: number of samples, at least `batch`.
        position: number of samples used or skipped before the step, over all epochs.
        batch: number of samples in the step, on all ranks together.

    Returns:
        The epoch of the step; the index of its first sample in the order of that epoch;
        and the value of `position` after the step.

    Example:
        >>> from tfdist.data._epoch_order import step_at
        >>> step_at(10, position=0, batch=4), step_at(10, position=4, batch=4)
        ((0, 0, 4), (0, 4, 10))
        >>> step_at(10, position=4, batch=8)
        (1, 0, 20)
    """
    epoch, first = divmod(position, total)
    if total - first < batch:
        epoch, first = epoch + 1, 0
    end = first + batch
    if total - end < batch:
        end = total
    return epoch, first, epoch * total + end


def rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Returns the checked arguments; None is replaced with this process's value."""
    rank = runtime.rank() if rank is None else check_int("rank", rank, 0)
    size = runtime.size() if size is None else check_int("size", size, 1)
    if rank >= size:
        raise ValueError(f"Expected rank to be in 0..{size - 1}, got {rank}.")
    return rank, size


@functools.lru_cache(maxsize=2)
def latest_order(total: int, seed: int, epoch: int) -> np.ndarray:
    """Returns `epoch_order`, cached for the next steps of the same epoch."""
    order = epoch_order(total, seed=seed, epoch=epoch)
    order.flags.writeable = False
    return order


def check_batch(total: int, global_batch: int, size: int) -> None:
    """Raises unless every rank gets an equal, full part of every step.

    Args:
        total: number of samples.
        global_batch: number of samples per step on all ranks together.
        size: number of ranks.

    Raises:
        ValueError: the samples or the global batch cannot be divided equally. The
            message contains valid values.
    """
    if total < size:
        advice = f"Start at most {total} ranks." if total else "Check the data."
        raise ValueError(
            f"Expected at least one sample for each of {size} ranks, got {total} "
            f"samples. {advice}"
        )
    below = global_batch // size * size
    if below != global_batch:
        nearest = [str(n) for n in (below, below + size) if 0 < n]
        raise ValueError(
            f"Expected global_batch to be a multiple of {size}, the number of ranks, "
            f"got {global_batch}. Nearest valid values: {' and '.join(nearest)}."
        )
    if total < global_batch:
        largest = total // size * size
        raise ValueError(
            f"Expected at least one global batch of samples, got {total} samples for a "
            f"global_batch of {global_batch}. With {size} ranks the largest valid "
            f"global_batch for this data is {largest}."
        )


def check_int(name: str, value: int, least: int) -> int:
    """Returns the value of an argument as an integer in `least`..2**64 - 1.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"Expected {name} to be an integer, got {value!r}.")
    if not least <= value < _WORD:
        raise ValueError(f"Expected {name} to be in {least}..2**64 - 1, got {value}.")
    return int(value)
