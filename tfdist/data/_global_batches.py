"""Batches for `model.fit` in a job whose number of ranks may change."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.core.rendezvous import renewal
from tfdist.data._dataset_checks import count_rows
from tfdist.data._epoch_order import check_int, epoch_order
from tfdist.data._records import Records

# Dataset → the source of its batches.
_sources: WeakRegistry[Source] = WeakRegistry()


def global_batches(
    data: Any,
    *,
    global_batch: int | None = None,
    per_rank_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    map_fn: Callable[..., Any] | None = None,
    drop_remainder: bool = True,
) -> tf.data.Dataset:
    """Returns this rank's share of each batch.

    Use it with `tfdist.callbacks.Elastic`, which sets the epoch, and continues at the
    same sample when the ranks change. Each step uses the next samples of an order that
    does not depend on the number of ranks (`tfdist.data.epoch_order`).

    With `global_batch`, a step uses that many samples, for any number of ranks, as in
    `tfdist.data.samples_of_step`: the ranks' shares differ by at most one sample. With
    `per_rank_batch`, each rank uses that many samples in a step: with more ranks, an
    epoch has fewer steps. All ranks have the same number of steps.

    Without the callback, each pass over the dataset is the next epoch.

    Args:
        data: the samples: an array, or a tuple or dict of arrays, with the samples
            along the first axis; or `tfdist.data.Records`. Arrays are kept in memory
            as tensors.
        global_batch: samples of all ranks in one step, at least the number of ranks.
        per_rank_batch: samples of one rank in one step. Exactly one of the two sizes
            has to be given.
        shuffle: whether every epoch has its own order; default True.
        seed: base of the order, 0..2**64 - 1; default 0.
        map_fn: function that is applied to each sample, in parallel. Its arguments are
            the components of a sample; for `Records`, the bytes of the record.
            Default: none.
        drop_remainder: whether the remaining samples, too few for a step, are left out
            of an epoch; with `shuffle`, other samples are left out in each epoch. If
            False, they are added to the last step, which is possible only with
            `global_batch`; use it for validation. Default True.

    Returns:
        A dataset with one element for each step, of unknown batch size: for n samples
        `n // global_batch` elements, or `n // (per_rank_batch * size)`. In an elastic
        job with `per_rank_batch`, `len` is the number of steps of a single rank.

    Raises:
        TypeError: `data` is neither arrays nor `Records`, or an argument is not an
            integer.
        ValueError: both sizes or none are given; there are fewer samples than in one
            step; or arrays of different lengths; or `drop_remainder=False` with
            `per_rank_batch`; or an argument is out of range.
        tf.errors.InvalidArgumentError: when the dataset is iterated: the global batch
            has fewer samples than there are ranks; or, with `per_rank_batch` in an
            elastic job, `fit` has no `Elastic`.

    Example:
        >>> import numpy as np, tfdist
        >>> tfdist.init()
        >>> train = tfdist.data.global_batches(
        ...     np.arange(10), global_batch=4, shuffle=False)
        >>> [b.tolist() for b in train.as_numpy_iterator()]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if (global_batch is None) == (per_rank_batch is None):
        raise ValueError(
            "Expected either global_batch or per_rank_batch, got "
            f"global_batch={global_batch!r} and per_rank_batch={per_rank_batch!r}."
        )
    if global_batch is not None:
        batch = check_int("global_batch", global_batch, 1)
    else:
        batch = check_int("per_rank_batch", cast(int, per_rank_batch), 1)
    source = Source(
        data,
        batch=batch,
        is_per_rank=global_batch is None,
        shuffle=shuffle,
        seed=seed,
        map_fn=map_fn,
        drop_remainder=drop_remainder,
    )
    known = tf.data.experimental.assert_cardinality(source.most_steps)
    dataset = source.dataset.apply(known)
    _sources.set(dataset, source)
    return dataset


def source_of(dataset: Any) -> Source | None:
    """Returns the source of a dataset of `global_batches`; None for other datasets."""
    return _sources.get(dataset) if dataset in _sources else None


class Source:
    """Samples, and the position from which the next iteration begins.

    Args:
        data: the samples.
        batch: samples of all ranks, or of one, in a step.
        is_per_rank: whether `batch` is the number for one rank.
        shuffle: see `global_batches`, as for the other arguments.

    Attributes:
        total: number of samples.
        is_per_rank: whether the number of ranks changes the samples of a step.
        drop_remainder: whether the remaining samples are left out.
        most_steps: number of steps of an epoch on the smallest possible number of
            ranks.
        dataset: the batches of the current ranks, from the current position.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch: int,
        is_per_rank: bool,
        shuffle: bool,
        seed: int,
        map_fn: Callable[..., Any] | None,
        drop_remainder: bool,
    ) -> None:
        self._batch = batch
        self.is_per_rank = is_per_rank
        self._seed = check_int("seed", seed, 0)
        self._shuffle = bool(shuffle)
        self.drop_remainder = bool(drop_remainder)
        read: Callable[..., Any]
        if isinstance(data, Records):
            self.total, read = len(data), data.read
        else:
            self.total = count_rows(data, "arrays, or tfdist.data.Records,")
            tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
            read = _reader(tensors)
        self._ranks_may_change = is_per_rank and renewal.is_elastic(os.environ)
        least = 1 if self._ranks_may_change or not is_per_rank else runtime.size()
        self._check_sizes()
        self.most_steps = self.steps_left(0, least)
        self._next_epoch: Iterator[int] = itertools.count()
        self._position: tuple[int, int] | None = None
        rows = tf.data.Dataset.from_generator(
            self._rows, output_signature=tf.TensorSpec([None], tf.int64)
        )
        self.dataset = _mapped(rows, read, map_fn).prefetch(tf.data.AUTOTUNE)

    def step_size(self, size: int) -> int:
        """Returns the number of samples of a step on `size` ranks together."""
        return self._batch * size if self.is_per_rank else self._batch

    def steps_left(self, samples: int, size: int) -> int:
        """Returns the number of steps of an epoch, on `size` ranks, after `samples`."""
        return (self.total - samples) // self.step_size(size)

    def describe(self) -> str:
        """Describes what has to be equal on all ranks."""
        each = " each" if self.is_per_rank else ""
        return f"{self.total} samples in steps of {self._batch}{each}"

    def seek(self, epoch: int, samples: int = 0) -> None:
        """Sets the position from which the next iterations begin.

        Args:
            epoch: counted from 0.
            samples: number of samples of the epoch that have been used.
        """
        self._position = (epoch, samples)

    def _check_sizes(self) -> None:
        if self.is_per_rank and not self.drop_remainder:
            raise ValueError(
                "Expected global_batch with drop_remainder=False, got per_rank_batch="
                f"{self._batch}. For validation, use a global_batch."
            )
        if self._ranks_may_change:
            most = renewal.largest_size(os.environ)
        else:
            most = runtime.size() if self.is_per_rank else 1
        if self.total >= self.step_size(most):
            return
        named = f"a global_batch of {self._batch}"
        if self.is_per_rank:
            named = f"a per_rank_batch of {self._batch} and up to {most} ranks"
        raise ValueError(
            f"Expected enough samples for one step, got {self.total} samples for "
            f"{named}."
        )

    def _rows(self) -> Iterator[np.ndarray]:
        """Yields the positions of this rank's samples, step by step."""
        if self._ranks_may_change and self._position is None:
            raise ValueError(
                "A job started with --min-np needs tfdist.callbacks.Elastic for data "
                "with per_rank_batch: pass the data to fit, and Elastic() in "
                "callbacks, or use a global_batch."
            )
        epoch, samples = self._position or (next(self._next_epoch), 0)
        rank, size = runtime.rank(), runtime.size()
        batch = self.step_size(size)
        if size > batch:
            raise ValueError(
                f"Expected a global_batch of at least {size}, the number of ranks, got "
                f"{batch}."
            )
        order = np.arange(self.total)
        if self._shuffle:
            order = epoch_order(self.total, seed=self._seed, epoch=epoch)
        left = self.steps_left(samples, size)
        for step in range(left):
            first = samples + step * batch
            end = first + batch
            if step == left - 1 and not self.drop_remainder:
                end = self.total
            yield np.array_split(order[first:end], size)[rank]


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
