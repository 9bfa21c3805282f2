"""Data for one rank: its share of a data set, in as many steps as every other rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _runtime

_SEED_BITS = 31
_ODD = 0x9E3779B1  # odd, so multiplying by it modulo a power of two is a bijection


def shard(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool | int = False,
    seed: int = 0,
    map_fn: Callable[..., Any] | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """The batches of this rank: its share of the samples, in equal numbers of steps.

    Sample i belongs to rank i mod `size`. So in every epoch the ranks' samples are
    disjoint, their union is the data set, and their numbers differ by one at most.
    The samples are cut into the same number of batches on every rank, also where the
    data do not divide: at each step the ranks' batches differ by one sample at most.
    Such a step still averages the ranks' gradients with equal weights; the metrics of
    `tfdist.callbacks.MetricAverage` weight every sample alike.

    Args:
        data: a `tf.data.Dataset` of single samples (not shuffled, not batched, not
            repeated, not sharded) of known cardinality; or an array, or a tuple or
            dict of arrays with the samples along the first axis.
        batch_size: samples of one rank in one step, at least 1. The last batches may
            be smaller; with `batch_size=1` and data that do not divide, the last
            batch of some ranks has two.
        shuffle: True: shuffle this rank's samples anew in every epoch; an integer: do
            it with a buffer of that many samples; default False.
        seed: base of the shuffle's seed, see `tfdist.data.seed`; default 0.
        map_fn: applied to each sample of this rank only, in parallel, after the
            shuffle and before batching; takes the components of a sample.
        rank: default `tfdist.rank()`.
        size: default `tfdist.size()`.

    Returns:
        A dataset of batches, of the same known cardinality on all ranks, for
        `model.fit` or a loop.

    Raises:
        TypeError: `data` is neither a dataset nor arrays, or is a list.
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
    rank = _runtime.rank() if rank is None else rank
    size = _runtime.size() if size is None else size
    if not 0 <= rank < size:
        raise ValueError(f"Expected rank of 0..{size - 1}, got {rank}.")
    if batch_size < 1:
        raise ValueError(f"Expected batch_size of at least 1, got {batch_size}.")
    if isinstance(data, tf.data.Dataset):
        check_order(data, "tfdist.data.shard", size)
        check_single_samples(data, "tfdist.data.shard")
        total = _cardinality(data)
        own = data.shard(size, rank)
    else:
        total, part = _part_of_arrays(data, rank, size)
        own = tf.data.Dataset.from_tensor_slices(part)
    sizes = batch_sizes(total, batch_size=batch_size, rank=rank, size=size)
    if shuffle:
        buffer_size = sum(sizes) if shuffle is True else int(shuffle)
        own = own.shuffle(buffer_size, seed=_rank_seed(seed, rank))
    if map_fn is not None:
        own = own.map(map_fn, num_parallel_calls=tf.data.AUTOTUNE)
    return _batch(own, sizes, batch_size).prefetch(tf.data.AUTOTUNE)


def batch_sizes(total: int, *, batch_size: int, rank: int, size: int) -> list[int]:
    """The sizes of one rank's batches; the same number of batches on every rank.

    Args:
        total: samples of the whole data set.
        batch_size: samples of one rank in one step.
        rank: the rank asked for.
        size: number of ranks.

    Returns:
        One positive number for each step; their sum is the rank's share. At each
        step the numbers of two ranks differ by one at most.

    Raises:
        ValueError: there are fewer samples than ranks.

    Example:
        >>> [batch_sizes(9, batch_size=2, rank=r, size=2) for r in range(2)]
        [[2, 2, 1], [2, 1, 1]]
    """
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
    """A seed of this rank: reproducible, and different from all other ranks' seeds.

    For what should differ between ranks (augmentation, dropout, shuffling). What has
    to be equal, e.g. the initial weights, is sent by `BroadcastInitialState`.

    Args:
        base: any non-negative integer; the run's seed; default 0.
        rank: default `tfdist.rank()`.

    Returns:
        An integer of 0..2**31 - 1, for `keras.utils.set_random_seed` and the like.

    Raises:
        ValueError: `base` is negative.

    Example:
        >>> import tfdist
        >>> tfdist.data.seed(7, rank=0) != tfdist.data.seed(7, rank=1)
        True
    """
    if base < 0:
        raise ValueError(f"Expected a base of at least 0, got {base}.")
    return _rank_seed(base, _runtime.rank() if rank is None else rank)


def _rank_seed(base: int, rank: int) -> int:
    modulus = 1 << _SEED_BITS
    start = int(np.random.SeedSequence(base).generate_state(1)[0])
    return (start + rank) * _ODD % modulus


def check_order(dataset: tf.data.Dataset, function: str, size: int) -> None:
    """Raises if the samples are not the same, in the same order, on all ranks.

    Dealing out by position needs that: whatever makes the order random upstream, or
    leaves a rank a part of the samples, would let ranks share samples and miss others.

    Args:
        dataset: what will be dealt out.
        function: the function that deals it out, for messages.
        size: among how many ranks.

    Raises:
        ValueError: it is shuffled, sharded among so many, or not deterministic.
    """
    for node in _upstream(dataset):
        kind = type(node).__name__
        if "Shuffle" in kind:
            message = (
                f"The dataset is shuffled before {function}: each rank would pick from "
                "another order, so some samples would be seen twice and others never. "
                "Remove .shuffle(...) from the dataset"
            )
            if function != "tfdist.data.shard":
                raise ValueError(f"{message}.")
            raise ValueError(
                f"{message} and write\n"
                "    dataset = ...  # without .shuffle()\n"
                "    dataset = tfdist.data.shard(dataset, batch_size=..., shuffle=True)"
            )
        if kind == "_ShardDataset" and _shards(node) == size > 1:
            raise ValueError(
                f"The dataset has a .shard({size}, ...) before {function}, which deals "
                "it out itself: of the rank's part each rank would get a part again, "
                "and most samples would be left out. Remove .shard(...) (or "
                "tfdist.data.shard) from the dataset."
            )
        if getattr(node, "_deterministic", None) in ("false", False):
            raise ValueError(
                f"The dataset has a step ({kind}) with deterministic=False before "
                f"{function}, so its order differs between ranks. Write "
                "deterministic=True there."
            )
    if dataset.options().deterministic is False:
        raise ValueError(
            "The dataset has the option deterministic=False, so its order differs "
            f"between ranks. Set it to True before {function}."
        )


def check_single_samples(dataset: tf.data.Dataset, function: str) -> None:
    """Raises if a dataset is batched that should not be.

    Args:
        dataset: what will be batched.
        function: the function that batches it, for messages.

    Raises:
        ValueError: it is batched.
    """
    for node in _upstream(dataset):
        kind = type(node).__name__
        if "Unbatch" in kind or "FlatMap" in kind:
            return
        if "Batch" in kind:
            raise ValueError(
                f"The dataset is batched before {function}, which was to deal out "
                "single samples. Remove .batch(...) and give batch_size= to "
                f"{function}, or add .unbatch() before it."
            )


def _upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The dataset and all it is made of, from the end to the sources."""
    waiting = [dataset]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(node._inputs())


def _shards(node: Any) -> int | None:
    """Among how many a `.shard(...)` deals out; None if that is not known yet."""
    count = tf.get_static_value(node._num_shards)
    return None if count is None else int(count)


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
    """The number of samples, and this rank's rows of every array."""
    if _has_list(data):
        raise TypeError(
            "Expected a tuple or dict of arrays, got a list, which tf.data makes one "
            "array of, whose first axis is the list. Write (a, b) for [a, b], or "
            "numpy.asarray(...) for the samples of one array."
        )
    arrays = tf.nest.flatten(data)
    if not arrays or not all(hasattr(a, "shape") and len(a.shape) for a in arrays):
        raise TypeError(
            "Expected a tf.data.Dataset, or arrays with the samples along the first "
            f"axis, got {type(data).__name__}."
        )
    lengths = {int(a.shape[0]) for a in arrays}
    if len(lengths) != 1:
        raise ValueError(
            f"Expected arrays with equal first axes, got lengths {sorted(lengths)}."
        )
    return lengths.pop(), tf.nest.map_structure(lambda a: a[rank::size], data)


def _has_list(data: Any) -> bool:
    if isinstance(data, dict):
        data = tuple(data.values())
    return isinstance(data, list) or (
        isinstance(data, tuple) and any(map(_has_list, data))
    )


def _batch(
    dataset: tf.data.Dataset, sizes: list[int], batch_size: int
) -> tf.data.Dataset:
    """Cuts `dataset` into batches of the given sizes."""
    if all(n == batch_size for n in sizes[:-1]) and sizes[-1] <= batch_size:
        return dataset.batch(batch_size)
    ends = tf.constant(np.cumsum(sizes), tf.int64)
    lengths = tf.constant(sizes, tf.int64)
    windows = dataset.enumerate().group_by_window(
        key_func=lambda i, _: tf.searchsorted(
            ends, [i], side="right", out_type="int64"
        )[0],
        reduce_func=lambda _, window: window.map(lambda _, x: x).batch(batch_size + 1),
        window_size_func=lambda step: lengths[step],
    )
    return windows.apply(tf.data.experimental.assert_cardinality(len(sizes)))
