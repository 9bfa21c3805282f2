"""The order of the samples of an epoch: one for any number of ranks.

Every step takes the next `global_batch` samples of a permutation that depends on the
seed and the epoch alone, and the ranks divide them. So a run that was interrupted goes
on at the same sample with another number of ranks. Only NumPy is used here.
"""

from __future__ import annotations

import numbers

import numpy as np

from tfdist.core import runtime

_WORD = 1 << 64


def epoch_order(total: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of the samples, equal on all ranks, machines and versions.

    The samples are sorted by random keys of 64 bits: sample i has the i-th word of
    the counter-based generator Philox4x64-10 with the key (seed, epoch), as
    `numpy.random.Philox(key=[seed, epoch]).random_raw()` gives it; of two equal keys
    the smaller sample comes first. The words are laid down by the paper, and nothing
    of NumPy's shuffling, which may change between versions, is used.

    Args:
        total: number of samples, at least 0.
        seed: the run's seed, 0..2**64 - 1.
        epoch: 0..2**64 - 1; every epoch has an order of its own.

    Returns:
        int64 array of shape `[total]` with each of 0..total - 1 once.

    Raises:
        TypeError: an argument is no integer.
        ValueError: one is negative, or too large.

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
    """Positions of the samples that one rank reads in each step of an epoch.

    An epoch has `total // global_batch` steps. Step t takes the samples
    `epoch_order(total, seed, epoch)[t * global_batch:(t + 1) * global_batch]`, rank r
    the r-th of `size` equal parts of them. The rest, less than one batch, is left out;
    it is another one in every epoch. So the samples of a step are the same for any
    number of ranks, and each sample is read once at most in an epoch.

    Args:
        total: number of samples, at least `global_batch`.
        global_batch: samples of all ranks in one step; a multiple of `size`.
        seed: the run's seed, 0..2**64 - 1.
        epoch: 0..2**64 - 1.
        rank: default `tfdist.rank()`.
        size: default `tfdist.size()`.
        first_step: the step to begin with, 0..steps; default 0. Steps before it were
            done by the run that this one continues.

    Returns:
        int64 array of shape `[total // global_batch - first_step,
        global_batch // size]`: a row for each step.

    Raises:
        TypeError: an argument is no integer.
        ValueError: the global batch does not divide, there are fewer samples than
            ranks or than a global batch, or a number is out of its range; the message
            has valid numbers.

    Example:
        >>> from tfdist.data import positions
        >>> whole = positions(7, global_batch=2, seed=3, epoch=0, rank=0, size=1)
        >>> [positions(7, global_batch=2, seed=3, epoch=0, rank=r, size=2)
        ...  .ravel().tolist() for r in range(2)] == whole.T.tolist()
        True
    """
    rank = runtime.rank() if rank is None else check_int("rank", rank, 0)
    size = runtime.size() if size is None else check_int("size", size, 1)
    if rank >= size:
        raise ValueError(f"Expected rank of 0..{size - 1}, got {rank}.")
    total = check_int("total", total, 0)
    global_batch = check_int("global_batch", global_batch, 1)
    check_batch(total, global_batch, size)
    steps = total // global_batch
    first_step = check_int("first_step", first_step, 0)
    if first_step > steps:
        raise ValueError(
            f"Expected first_step of 0..{steps} (the epoch has {steps} steps of "
            f"{global_batch} of {total} samples), got {first_step}."
        )
    order = epoch_order(total, seed=seed, epoch=epoch)
    rows = order[: steps * global_batch].reshape(steps, size, global_batch // size)
    return rows[first_step:, rank]


def check_batch(total: int, global_batch: int, size: int) -> None:
    """Raises unless every rank gets an equal, full part of every step.

    Args:
        total: number of samples.
        global_batch: samples of all ranks in one step.
        size: number of ranks.

    Raises:
        ValueError: with the numbers that would do.
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
            f"Expected a global_batch that {size} ranks divide equally, got "
            f"{global_batch}. The nearest that do: {' and '.join(nearest)}."
        )
    if total < global_batch:
        largest = total // size * size
        raise ValueError(
            f"Expected at least one global batch of samples, got {total} samples for a "
            f"global_batch of {global_batch}. With {size} ranks these data allow at "
            f"most {largest}."
        )


def check_int(name: str, value: int, least: int) -> int:
    """Returns the value of an argument as an integer of at least `least` and 64 bits.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"Expected {name} as an integer, got {value!r}.")
    if not least <= value < _WORD:
        raise ValueError(f"Expected {name} of {least}..2**64 - 1, got {value}.")
    return int(value)
