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
from tfdist.data import _dataset_checks
from tfdist.data._batch_schedule import BatchSchedule, schedule_of
from tfdist.data._epoch_order import check_int, epoch_order
from tfdist.data._records import Records

# Dataset → the source of its batches.
_sources: WeakRegistry[Source] = WeakRegistry()


def global_batches(
    data: Any,
    *,
    global_batch: int | BatchSchedule | None = None,
    per_rank_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    map_fn: Callable[..., Any] | None = None,
    drop_remainder: bool = True,
) -> tf.data.Dataset:
    """Returns a dataset of batches with this rank's share of the samples of each step.

    Use the dataset with `tfdist.callbacks.Elastic`. The callback sets the epoch, and
    continues at the same sample when ranks leave or join. Each step uses the next
    samples of an order that does not depend on the number of ranks
    (`tfdist.data.epoch_order`).

    With `global_batch`, a step uses that many samples, for any number of ranks, as in
    `tfdist.data.samples_of_step`: the ranks' shares differ by at most one sample. With
    `per_rank_batch`, each rank uses that many samples in a step: with more ranks, an
    epoch has fewer steps. All ranks have the same number of steps.

    Without the callback, each pass over the dataset is the next epoch. A
    `BatchSchedule` always needs the callback, because Keras expects the same number of
    steps in all epochs.

    Args:
        data: the samples: an array, or a tuple or dict of arrays, with the samples
            along the first axis; or `tfdist.data.Records`. Arrays are kept in memory
            as tensors.
        global_batch: number of samples per step on all ranks together, at least the
            number of ranks; or a `tfdist.data.BatchSchedule`, to use larger batches in
            later epochs.
        per_rank_batch: number of samples per step on each rank. Pass either
            `global_batch` or `per_rank_batch`.
        shuffle: whether to shuffle the samples, differently in every epoch; default
            True.
        seed: seed of the shuffled order, 0..2**64 - 1; default 0.
        map_fn: function that is applied to each sample, in parallel. Its arguments are
            the components of a sample; for `Records`, the bytes of the record.
            Default: none.
        drop_remainder: whether to skip the samples at the end of an epoch that are too
            few for a step. With `shuffle`, different samples are skipped in each epoch.
            If False, these samples are added to the last step, which is possible only
            with a constant `global_batch`; use it for validation. Default True.

    Returns:
        A dataset with one batch for each step; its `element_spec` has an unknown batch
        size. For n samples, it has `n // global_batch` or
        `n // (per_rank_batch * size)` batches. In an elastic job with `per_rank_batch`,
        `len` returns the number of steps that a single rank would have. With a
        `BatchSchedule`, it returns the number of steps in an epoch with the smallest
        batch.

    Raises:
        TypeError: `data` is neither arrays nor `Records`, or an argument is not an
            integer.
        ValueError: both or neither of `global_batch` and `per_rank_batch` are given;
            there are fewer samples than one step needs; the arrays have different
            lengths; `drop_remainder=False` is used with `per_rank_batch` or with a
            batch that changes; or an argument is out of range.
        tf.errors.InvalidArgumentError: raised during iteration: the global batch is
            smaller than the number of ranks; or `Elastic` is missing in `fit`, although
            the data have a `BatchSchedule`, or `per_rank_batch` in an elastic job.

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
        batch = schedule_of(global_batch)
    else:
        own = check_int("per_rank_batch", cast(int, per_rank_batch), 1)
        batch = schedule_of(own)
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
    return _dataset_checks.mark(dataset, _dataset_checks.CURRENT_SIZE)


def source_of(dataset: Any) -> Source | None:
    """Returns the source of a dataset of `global_batches`; None for other datasets."""
    return _sources.get(dataset) if dataset in _sources else None


class Source:
    """The samples of a dataset, and the epoch and sample at which it continues.

    Args:
        data: the samples.
        batch: the global batch of each epoch, or the per-rank batch.
        is_per_rank: whether `batch` is the per-rank batch.
        shuffle: see `global_batches`.
        seed: see `global_batches`.
        map_fn: see `global_batches`.
        drop_remainder: see `global_batches`.

    Attributes:
        total: number of samples.
        is_per_rank: whether the batch is per rank, so that the number of samples in a
            step depends on the number of ranks.
        steps_vary: whether epochs may have different numbers of steps.
        drop_remainder: whether samples that are too few for a step are skipped.
        most_steps: largest possible number of steps in an epoch: with the smallest
            batch, on the smallest possible number of ranks.
        dataset: this rank's batches, from the epoch and sample set by `seek`.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch: BatchSchedule,
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
            self.total = _dataset_checks.count_rows(
                data, "arrays, or tfdist.data.Records,"
            )
            with tf.device("CPU:0"):  # not in the memory of a GPU
                tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
            read = _reader(tensors)
        ranks_may_change = is_per_rank and renewal.is_elastic(os.environ)
        self.steps_vary = ranks_may_change or len(batch.batches) > 1
        self._check_sizes(ranks_may_change)
        least = 1 if ranks_may_change or not is_per_rank else runtime.size()
        self.most_steps = max(self.steps_left(e, 0, least) for e in batch.batches)
        self._next_epoch: Iterator[int] = itertools.count()
        self._position: tuple[int, int] | None = None
        rows = tf.data.Dataset.from_generator(
            self._rows, output_signature=tf.TensorSpec([None], tf.int64)
        )
        self.dataset = _mapped(rows, read, map_fn).prefetch(tf.data.AUTOTUNE)

    def step_size(self, epoch: int, size: int) -> int:
        """Returns the number of samples that `size` ranks use together in a step."""
        batch = self._batch.batch_of(epoch)
        return batch * size if self.is_per_rank else batch

    def step_sizes(self, size: int) -> list[int]:
        """Returns all global batch sizes that occur, in the order of the epochs."""
        return [self.step_size(epoch, size) for epoch in self._batch.batches]

    def steps_left(self, epoch: int, samples: int, size: int) -> int:
        """Returns how many steps an epoch has left after `samples`, on `size` ranks."""
        return (self.total - samples) // self.step_size(epoch, size)

    def place_of(self, step: int) -> tuple[int, int]:
        """Returns the epoch of a step, and the index of the step in that epoch.

        Only for a global batch, which does not depend on the number of ranks.

        Args:
            step: counted from 0 over all epochs.
        """
        return self._batch.place_of(step, total=self.total)

    def describe(self) -> str:
        """Describes the settings that have to be equal on all ranks."""
        each = " each" if self.is_per_rank else ""
        batches = self._batch.batches
        sizes = batches[0] if len(batches) == 1 else f"{batches} by epoch"
        order = f"seed {self._seed}" if self._shuffle else "not shuffled"
        return f"{self.total} samples in steps of {sizes}{each}, {order}"

    def seek(self, epoch: int, samples: int = 0) -> None:
        """Sets the epoch and the sample at which the next iterations begin.

        Args:
            epoch: counted from 0.
            samples: number of samples of the epoch that have been used.
        """
        self._position = (epoch, samples)

    def release(self) -> None:
        """Undoes `seek`: each iteration is again the next epoch, from epoch 0 on."""
        self._position, self._next_epoch = None, itertools.count()

    def _check_sizes(self, ranks_may_change: bool) -> None:
        if not self.is_per_rank:
            self._batch.check_total(self.total)
            if self.steps_vary and not self.drop_remainder:
                raise ValueError(
                    "Expected a number as global_batch with drop_remainder=False, got "
                    f"{self._batch!r}."
                )
            return
        batch = self._batch.batches[0]
        if not self.drop_remainder:
            raise ValueError(
                "Expected global_batch with drop_remainder=False, got per_rank_batch="
                f"{batch}. For validation, use a global_batch."
            )
        if ranks_may_change:
            most = renewal.largest_size(os.environ)
        else:
            most = runtime.size()
        if self.total >= batch * most:
            return
        named = f"a per_rank_batch of {batch} and up to {most} ranks"
        raise ValueError(
            f"Expected enough samples for one step, got {self.total} samples for "
            f"{named}."
        )

    def _rows(self) -> Iterator[np.ndarray]:
        """Yields the indices of this rank's samples, one array per step."""
        if self.steps_vary and self._position is None:
            needs = "Data with a BatchSchedule need tfdist.callbacks.Elastic"
            if self.is_per_rank:
                needs = (
                    "A job started with --min-np needs tfdist.callbacks.Elastic for "
                    "data with per_rank_batch"
                )
            raise ValueError(
                f"{needs}: pass the data to fit, and Elastic() in callbacks, or use a "
                "global_batch that is a number."
            )
        epoch, samples = self._position or (next(self._next_epoch), 0)
        rank, size = runtime.rank(), runtime.size()
        batch = self.step_size(epoch, size)
        if size > batch:
            raise ValueError(
                f"Expected a global_batch of at least {size}, the number of ranks, got "
                f"{batch}."
            )
        order = np.arange(self.total)
        if self._shuffle:
            order = epoch_order(self.total, seed=self._seed, epoch=epoch)
        left = self.steps_left(epoch, samples, size)
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
    """Returns a dataset that reads and maps the samples of each step."""
    if map_fn is None:
        return rows.map(read, num_parallel_calls=tf.data.AUTOTUNE)

    def one_batch(own: tf.Tensor) -> tf.data.Dataset:
        samples = tf.data.Dataset.from_tensor_slices(own).map(
            read, num_parallel_calls=tf.data.AUTOTUNE
        )
        mapped = samples.map(map_fn, num_parallel_calls=tf.data.AUTOTUNE)
        return mapped.batch(tf.size(own, out_type=tf.int64))

    return rows.flat_map(one_batch)
