"""Batches for `model.fit` in a job whose number of ranks may change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.data._dataset_checks import count_rows
from tfdist.data._epoch_order import check_int, epoch_order
from tfdist.data._records import Records

# Dataset → the source of its batches.
_sources: WeakRegistry[Source] = WeakRegistry()


def global_batches(
    data: Any,
    *,
    global_batch: int,
    shuffle: bool = True,
    seed: int = 0,
    map_fn: Callable[..., Any] | None = None,
    drop_remainder: bool = True,
) -> tf.data.Dataset:
    """Returns this rank's parts of batches that do not depend on the number of ranks.

    Use it with `tfdist.callbacks.Elastic`, which sets the epoch, and continues at the
    same step when the ranks change. Each step uses the next `global_batch` samples, as
    `tfdist.data.samples_of_step` does: the current ranks divide them, and their parts
    differ by at most one sample. All ranks have the same number of steps.

    Without the callback, each pass over the dataset is the next epoch.

    Args:
        data: the samples: an array, or a tuple or dict of arrays, with the samples
            along the first axis; or `tfdist.data.Records`. Arrays are kept in memory
            as tensors.
        global_batch: samples of all ranks in one step, at least the number of ranks.
        shuffle: whether every epoch has its own order; default True.
        seed: base of the order, 0..2**64 - 1; default 0.
        map_fn: function that is applied to each sample, in parallel. Its arguments are
            the components of a sample; for `Records`, the bytes of the record.
            Default: none.
        drop_remainder: whether the remaining samples, fewer than `global_batch`, are
            left out of an epoch; with `shuffle`, other samples are left out in each
            epoch. If False, they are added to the last step; use it for validation.
            Default True.

    Returns:
        A dataset of `n // global_batch` batches of unknown batch size, for n samples.

    Raises:
        TypeError: `data` is neither arrays nor `Records`, or an argument is not an
            integer.
        ValueError: there are fewer samples than `global_batch`, or arrays of different
            lengths, or an argument is out of range. When the dataset is iterated: the
            global batch has fewer samples than there are ranks.

    Example:
        >>> import numpy as np, tfdist
        >>> tfdist.init()
        >>> train = tfdist.data.global_batches(
        ...     np.arange(10), global_batch=4, shuffle=False)
        >>> [b.tolist() for b in train.as_numpy_iterator()]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    source = Source(
        data,
        global_batch=global_batch,
        shuffle=shuffle,
        seed=seed,
        map_fn=map_fn,
        drop_remainder=drop_remainder,
    )
    known = tf.data.experimental.assert_cardinality(source.steps)
    dataset = source.dataset.apply(known)
    _sources.set(dataset, source)
    return dataset


def source_of(dataset: Any) -> Source | None:
    """Returns the source of a dataset of `global_batches`; None for other datasets."""
    return _sources.get(dataset) if dataset in _sources else None


class Source:
    """Samples, and the position from which the next iteration begins.

    Args:
        data: the samples, as all arguments in `global_batches`.

    Attributes:
        global_batch: samples of all ranks in one step.
        steps: number of steps of an epoch.
        drop_remainder: whether the remaining samples are left out.
        dataset: the batches of the current ranks, from the current position.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch: int,
        shuffle: bool,
        seed: int,
        map_fn: Callable[..., Any] | None,
        drop_remainder: bool,
    ) -> None:
        self.global_batch = check_int("global_batch", global_batch, 1)
        self._seed = check_int("seed", seed, 0)
        self._shuffle = bool(shuffle)
        self.drop_remainder = bool(drop_remainder)
        read: Callable[..., Any]
        if isinstance(data, Records):
            self._total, read = len(data), data.read
        else:
            self._total = count_rows(data, "arrays, or tfdist.data.Records,")
            tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
            read = _reader(tensors)
        if self._total < self.global_batch:
            raise ValueError(
                f"Expected at least one global batch of samples, got {self._total} "
                f"samples for a global_batch of {self.global_batch}."
            )
        self.steps = self._total // self.global_batch
        self._next_epoch: Iterator[int] = itertools.count()
        self._position: tuple[int, int] | None = None
        rows = tf.data.Dataset.from_generator(
            self._rows, output_signature=tf.TensorSpec([None], tf.int64)
        )
        self.dataset = _mapped(rows, read, map_fn).prefetch(tf.data.AUTOTUNE)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Sets the position from which the next iterations begin.

        Args:
            epoch: counted from 0.
            step: first step in the epoch.
        """
        self._position = (epoch, step)

    def _rows(self) -> Iterator[np.ndarray]:
        """Yields the positions of this rank's samples, step by step."""
        epoch, first = self._position or (next(self._next_epoch), 0)
        rank, size = runtime.rank(), runtime.size()
        if size > self.global_batch:
            raise ValueError(
                f"Expected a global_batch of at least {size}, the number of ranks, got "
                f"{self.global_batch}."
            )
        order = np.arange(self._total)
        if self._shuffle:
            order = epoch_order(self._total, seed=self._seed, epoch=epoch)
        for step in range(first, self.steps):
            end = (step + 1) * self.global_batch
            if step == self.steps - 1 and not self.drop_remainder:
                end = self._total
            yield np.array_split(order[step * self.global_batch : end], size)[rank]


def _reader(tensors: Any) -> Callable[[tf.Tensor], Any]:
    def read(rows: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda one: tf.gather(one, rows), tensors)

    return read


def _mapped(
    rows: tf.data.Dataset,
    read: Callable[[tf.Tensor], Any],
    map_fn: Callable[..., Any] | None,
) -> tf.data.Dataset:
    """Returns the samples of each step, read and mapped."""
    if map_fn is None:
        return rows.map(read, num_parallel_calls=tf.data.AUTOTUNE)

    def one_batch(own: tf.Tensor) -> tf.data.Dataset:
        samples = tf.data.Dataset.from_tensor_slices(own).map(
            read, num_parallel_calls=tf.data.AUTOTUNE
        )
        mapped = samples.map(map_fn, num_parallel_calls=tf.data.AUTOTUNE)
        return mapped.batch(tf.size(own, out_type=tf.int64))

    return rows.flat_map(one_batch)
