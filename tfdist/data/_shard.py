"""Shards a data set: each rank gets its share, in equally many steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.core import runtime
from tfdist.data import _dataset_checks, _loaders
from tfdist.data._epoch_order import check_int

_SEED_BITS = 31
# Odd, so multiplying by it modulo a power of two is a bijection: multiplicative hashing
# (D. E. Knuth, The Art of Computer Programming, volume 3, 1998, section 6.4).
_ODD = 0x9E3779B1


def shard(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool | int | None = None,
    seed: int = 0,
    map_fn: Callable[..., Any] | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """Returns this rank's batches: its share of the samples, in equally many steps.

    Sample i belongs to rank i mod `size`. So in every epoch the ranks' samples are
    disjoint, their union is the data set, and their numbers differ by one at most.
    The samples are cut into the same number of batches on every rank, also where the
    data do not divide: at each step the ranks' batches differ by one sample at most.
    Such a step still averages the ranks' gradients with equal weights; the metrics of
    `tfdist.callbacks.MetricAverage` weight every sample alike.

    Args:
        data: a `tf.data.Dataset` of single samples (not shuffled, not batched, not
            repeated, not sharded) of known cardinality; what a loader of Keras has
            returned (`keras.utils.image_dataset_from_directory` and those of texts and
            audio), whose files are dealt out and each decoded by one rank; or an array,
            or a tuple or dict of arrays with the samples along the first axis. A
            `tf.SparseTensor` has to be made a dataset
            (`tf.data.Dataset.from_tensor_slices`).
        batch_size: samples of one rank in one step, at least 1. The last batches may
            be smaller; with `batch_size=1` and data that do not divide, the last
            batch of some ranks has two.
        shuffle: True: reshuffle this rank's samples in every epoch; an integer: do
            it with a buffer of that many samples. Default None: as a loader of Keras
            does, where `data` is from one, whose files are shuffled; else False.
        seed: base of the shuffle's seed, see `tfdist.data.seed`; default 0.
        map_fn: applied to each sample of this rank only, in parallel, after the
            shuffle and before batching; takes the components of a sample.
        rank: default `tfdist.rank()`.
        size: default `tfdist.size()`.

    Returns:
        A dataset of batches, of the same known cardinality on all ranks, for
        `model.fit` or a loop.

    Raises:
        TypeError: `data` is neither a dataset nor arrays, or is a list; or a number is
            no integer.
        ValueError: the data are shuffled, sharded, batched, endless or of unknown
            cardinality, or there are fewer samples than ranks; the message says what
            to write.

    Example:
        >>> import numpy as np, tfdist
        >>> batches = tfdist.data.shard(
        ...     np.arange(10), batch_size=2, rank=1, size=3)
        >>> [b.tolist() for b in batches.as_numpy_iterator()]
        [[1, 4], [7]]
    """
    rank = runtime.rank() if rank is None else rank
    size = runtime.size() if size is None else size
    _check_rank(batch_size, rank, size)
    if not isinstance(shuffle, bool | np.bool_ | None):
        shuffle = check_int("shuffle", shuffle, 0)
    seed = check_int("seed", seed, 0)
    decode, pads = None, False
    loader = _loaders.take_apart(data) if isinstance(data, tf.data.Dataset) else None
    if loader is not None:
        total, decode, pads = len(loader.paths), loader.decode_files, loader.pads
        own = _dataset_checks.mark(loader.own_files(rank, size), size)
        shuffle = loader.shuffles if shuffle is None else shuffle
    elif isinstance(data, tf.data.Dataset):
        _dataset_checks.check_order(data, "tfdist.data.shard", size)
        _dataset_checks.check_single_samples(data, "tfdist.data.shard")
        total = _cardinality(data)
        own = data.shard(size, rank)
    else:
        total, part = _part_of_arrays(data, rank, size)
        own = _dataset_checks.mark(tf.data.Dataset.from_tensor_slices(part), size)
    sizes = batch_sizes(total, batch_size=batch_size, rank=rank, size=size)
    if shuffle:
        is_full_shuffle = isinstance(shuffle, bool | np.bool_)
        buffer_size = sum(sizes) if is_full_shuffle else int(shuffle)
        own = own.shuffle(buffer_size, seed=_rank_seed(seed, rank))
    if decode is not None:
        own = decode(own)
    if map_fn is not None:
        own = own.map(map_fn, num_parallel_calls=tf.data.AUTOTUNE)
    return _batch(own, sizes, batch_size, pads=pads).prefetch(tf.data.AUTOTUNE)


def batch_sizes(total: int, *, batch_size: int, rank: int, size: int) -> list[int]:
    """Returns the sizes of one rank's batches; their number is equal on every rank.

    Args:
        total: samples of the whole data set.
        batch_size: samples of one rank in one step.
        rank: the rank asked for.
        size: number of ranks.

    Returns:
        One positive number for each step; their sum is the rank's share. At each
        step the numbers of two ranks differ by one at most.

    Raises:
        TypeError: an argument is no integer.
        ValueError: there are fewer samples than ranks, or an argument is out of range.

    Example:
        >>> [batch_sizes(9, batch_size=2, rank=r, size=2) for r in range(2)]
        [[2, 2, 1], [2, 1, 1]]
    """
    _check_rank(batch_size, rank, size)
    total = check_int("total", total, 0)
    if total < size:
        ranks = "one rank" if total == 1 else f"at most {total} ranks"
        advice = f"Start {ranks}, or use more data." if total else "Check the data."
        raise ValueError(
            f"Expected at least one sample for each of {size} ranks, got {total} "
            f"samples. {advice}"
        )
    smallest, largest = total // size, math.ceil(total / size)
    own = smallest + (rank < total % size)
    # With batches of one sample a larger share would need one step more than a
    # smaller one has samples for: its last batch takes two.
    steps = min(math.ceil(largest / batch_size), smallest)
    last = own - (steps - 1) * batch_size
    if last > 0:
        return [batch_size] * (steps - 1) + [last]
    # The full batches used up this smaller share: the last batch borrows a sample.
    return [batch_size] * (steps - 2) + [batch_size - 1, 1]


def seed(base: int = 0, *, rank: int | None = None) -> int:
    """Returns a seed for this rank: reproducible, and different on all ranks.

    For what should differ between ranks (augmentation, dropout, shuffling). What has
    to be equal, e.g. the initial weights, is sent by `BroadcastInitialState`.

    Args:
        base: any non-negative integer; the run's seed; default 0.
        rank: default `tfdist.rank()`.

    Returns:
        An integer of 0..2**31 - 1, for `keras.utils.set_random_seed` and the like.

    Raises:
        TypeError: a number is no integer.
        ValueError: one is negative.

    Example:
        >>> import tfdist
        >>> tfdist.data.seed(7, rank=0) != tfdist.data.seed(7, rank=1)
        True
    """
    base = check_int("base", base, 0)
    rank = runtime.rank() if rank is None else check_int("rank", rank, 0)
    return _rank_seed(base, rank)


def _check_rank(batch_size: int, rank: int, size: int) -> None:
    check_int("batch_size", batch_size, 1)
    check_int("size", size, 1)
    if check_int("rank", rank, 0) >= size:
        raise ValueError(f"Expected rank of 0..{size - 1}, got {rank}.")


def _rank_seed(base: int, rank: int) -> int:
    modulus = 1 << _SEED_BITS
    start = int(np.random.SeedSequence(base).generate_state(1)[0])
    return (start + rank) * _ODD % modulus


def _cardinality(dataset: tf.data.Dataset) -> int:
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The dataset is endless. Remove .repeat() before tfdist.data.shard: fit "
            "starts it again in every epoch."
        )
    if count == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError(
            "The number of samples of the dataset is unknown, so the ranks cannot "
            "agree on the number of steps. Write dataset = dataset.apply("
            "tf.data.experimental.assert_cardinality(n)) before tfdist.data.shard."
        )
    return count


def _part_of_arrays(data: Any, rank: int, size: int) -> tuple[int, Any]:
    """Returns the number of samples, and this rank's rows of every array."""
    if _has_list(data):
        raise TypeError(
            "Expected a tuple or dict of arrays, got a list, which tf.data makes one "
            "array of, whose first axis is the list. Write (a, b) for [a, b], or "
            "numpy.asarray(...) for the samples of one array."
        )
    arrays = tf.nest.flatten(data)
    wrong = [a for a in arrays if not _has_rows(a)]
    if wrong or not arrays:
        found = type(data).__name__
        if wrong and wrong[0] is not data:
            found = f"{type(wrong[0]).__name__} in a {found}"
        advice = ""
        if wrong and isinstance(wrong[0], tf.SparseTensor):
            advice = (
                " Write tf.data.Dataset.from_tensor_slices(...) around the data, which "
                "gives one row of them after the other."
            )
        elif wrong and hasattr(wrong[0], "num_batches"):  # a PyDataset of Keras
            advice = (
                " A PyDataset makes batches itself: let its __getitem__ make those of "
                "this rank, tfdist.data.batch_sizes(...) says how large."
            )
        raise TypeError(
            "Expected a tf.data.Dataset, or arrays with the samples along the first "
            f"axis, got {found}.{advice}"
        )
    lengths = {int(a.shape[0]) for a in arrays}
    if len(lengths) != 1:
        raise ValueError(
            f"Expected arrays with equal first axes, got lengths {sorted(lengths)}."
        )
    return lengths.pop(), tf.nest.map_structure(lambda a: a[rank::size], data)


def _has_rows(array: Any) -> bool:
    """Whether every n-th row can be taken of it."""
    has_axes = hasattr(array, "shape") and len(array.shape) > 0
    return has_axes and hasattr(array, "__getitem__")


def _has_list(data: Any) -> bool:
    if isinstance(data, dict):
        data = tuple(data.values())
    return isinstance(data, list) or (
        isinstance(data, tuple) and any(map(_has_list, data))
    )


def _batch(
    dataset: tf.data.Dataset, sizes: list[int], batch_size: int, *, pads: bool
) -> tf.data.Dataset:
    """Cuts `dataset` into batches of the given sizes."""
    if all(n == batch_size for n in sizes[:-1]) and sizes[-1] <= batch_size:
        return dataset.padded_batch(batch_size) if pads else dataset.batch(batch_size)
    ends = tf.constant(np.cumsum(sizes), tf.int64)
    lengths = tf.constant(sizes, tf.int64)

    def one_batch(_: Any, window: tf.data.Dataset) -> tf.data.Dataset:
        if pads:
            return window.map(lambda _, x: x).padded_batch(batch_size + 1)
        # Batched before the map, which would convert rows of a RaggedTensor to tensors.
        return window.batch(batch_size + 1).map(lambda _, x: x)

    windows = dataset.enumerate().group_by_window(
        key_func=lambda i, _: tf.searchsorted(
            ends, [i], side="right", out_type="int64"
        )[0],
        reduce_func=one_batch,
        window_size_func=lambda step: lengths[step],
    )
    return windows.apply(tf.data.experimental.assert_cardinality(len(sizes)))
