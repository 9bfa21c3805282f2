"""Shards a data set into an equal number of steps on each rank."""

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
    """Returns this rank's share of the samples, in an equal number of batches per rank.

    In every epoch, sample i belongs to rank i mod `size`, and to no other rank. For the
    dataset of a Keras loader, i is the index of the file in the sorted list of files.
    The numbers of samples per rank differ by at most one.

    Every rank has the same number of batches, even if the samples cannot be divided
    equally. In each step, the ranks' batch sizes differ by at most one sample. If they
    differ, gradients are still averaged with equal weight for each rank, whereas
    `tfdist.callbacks.MetricAverage` weights all samples equally.

    Args:
        data: the samples, in one of three forms. A `tf.data.Dataset` of single samples
            (not shuffled, batched, repeated or sharded) of known cardinality. The
            dataset that a Keras loader has returned
            (`keras.utils.image_dataset_from_directory`, or the loaders for text and
            audio); its files are sharded, and each file is decoded on one rank. An
            array, or a tuple or dict of arrays, with the samples along the first axis.
            Convert a `tf.SparseTensor` to a dataset with
            `tf.data.Dataset.from_tensor_slices`.
        batch_size: number of samples per step on this rank, at least 1. The last
            batches may be smaller. With `batch_size=1` and samples that cannot be
            divided equally, the last batch of some ranks has two samples.
        shuffle: whether to reshuffle this rank's samples in every epoch. An integer
            sets the number of samples in the shuffle buffer. Default None: for the
            dataset of a Keras loader, shuffle the files if the loader shuffles;
            otherwise False.
        seed: base from which each rank's shuffle seed is derived, as by
            `tfdist.data.seed`; default 0.
        map_fn: function that is applied to each of this rank's samples, in parallel,
            after the shuffle and before batching. Its arguments are the components of
            a sample.
        rank: the rank whose batches are returned; default `tfdist.rank()`.
        size: number of ranks; default `tfdist.size()`.

    Returns:
        A dataset of batches for `model.fit` or a custom loop. It has the same known
        cardinality on all ranks.

    Raises:
        TypeError: `data` is a list, or neither a dataset nor arrays, or an argument is
            not an integer.
        ValueError: the dataset is shuffled, sharded, batched, infinite or of unknown
            cardinality, or there are fewer samples than ranks. The message says how to
            fix it.

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
        with tf.device("CPU:0"):  # not in the memory of a GPU
            own = tf.data.Dataset.from_tensor_slices(part)
        own = _dataset_checks.mark(own, size)
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
    """Returns the sizes of one rank's batches; all ranks have equally many batches.

    Args:
        total: number of samples in the data set.
        batch_size: number of samples per step on one rank.
        rank: the rank whose batch sizes are returned.
        size: number of ranks.

    Returns:
        The batch size of each step, at least 1. The sizes add up to the rank's number
        of samples. In each step, the sizes of any two ranks differ by at most one.

    Raises:
        TypeError: an argument is not an integer.
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
    # With batch_size=1, a rank with one sample more than the others would need one more
    # step than they can fill. Its last batch therefore has two samples.
    steps = min(math.ceil(largest / batch_size), smallest)
    last = own - (steps - 1) * batch_size
    if last > 0:
        return [batch_size] * (steps - 1) + [last]
    # If full batches would leave no sample for the last step, the second-to-last batch
    # is one sample smaller.
    return [batch_size] * (steps - 2) + [batch_size - 1, 1]


def seed(base: int = 0, *, rank: int | None = None) -> int:
    """Returns a reproducible seed that is different on each rank.

    Use it for random operations that should differ between ranks: augmentation,
    dropout, shuffling. Values that have to be equal on all ranks, such as the initial
    weights, are broadcast by `BroadcastInitialState`.

    Args:
        base: the run's seed, a non-negative integer; default 0.
        rank: the rank that uses the seed; default `tfdist.rank()`.

    Returns:
        An integer in 0..2**31 - 1, e.g. for `keras.utils.set_random_seed`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is negative.

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
        raise ValueError(f"Expected rank to be in 0..{size - 1}, got {rank}.")


def _rank_seed(base: int, rank: int) -> int:
    modulus = 1 << _SEED_BITS
    start = int(np.random.SeedSequence(base).generate_state(1)[0])
    return (start + rank) * _ODD % modulus


def _cardinality(dataset: tf.data.Dataset) -> int:
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The dataset is infinite. Remove .repeat() before tfdist.data.shard; fit "
            "restarts the dataset in every epoch."
        )
    if count == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError(
            "The number of samples of the dataset is unknown, so the ranks cannot "
            "agree on the number of steps. Write dataset = dataset.apply("
            "tf.data.experimental.assert_cardinality(n)) before tfdist.data.shard."
        )
    return count


def _part_of_arrays(data: Any, rank: int, size: int) -> tuple[int, Any]:
    """Returns the number of samples and this rank's rows of every array."""
    total = _dataset_checks.count_rows(data, "a tf.data.Dataset, or arrays")

    def part(array: Any) -> Any:
        # A slice of a pandas Series may refer to its labels.
        return getattr(array, "iloc", array)[rank::size]

    return total, tf.nest.map_structure(part, data)


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
        # Batching comes before the map, which would convert the rows of a RaggedTensor
        # to tensors.
        return window.batch(batch_size + 1).map(lambda _, x: x)

    windows = dataset.enumerate().group_by_window(
        key_func=lambda i, _: tf.searchsorted(
            ends, [i], side="right", out_type="int64"
        )[0],
        reduce_func=one_batch,
        window_size_func=lambda step: lengths[step],
    )
    return windows.apply(tf.data.experimental.assert_cardinality(len(sizes)))
