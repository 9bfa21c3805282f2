"""Warns when the ranks train on the same samples in `fit`."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks._callback_list import variables_of_fit
from tfdist.collectives import allgather
from tfdist.collectives.consistency.shared_samples import (
    SampleTap,
    can_hash_samples,
    common_samples,
    have_shared_samples,
    samples_per_rank,
)
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of

_logger = logging.getLogger("tfdist")
_DATASET = "_distributed_dataset"  # attribute of Keras's iterator over an epoch


class DataCheck:
    """Collects hashes of the samples in the first epoch of `fit`.

    Args:
        model: the model in `fit`; nothing is collected in a custom loop.
        process_set: the ranks that train; None for all.
    """

    def __init__(self, model: keras.Model, process_set: ProcessSet | None) -> None:
        self._ranks = process_set
        self._iterator: Any = None
        self._original: Any = None
        self._tap: SampleTap | None = None
        running = variables_of_fit(model)
        iterator = running.get("epoch_iterator") if running else None
        dataset = getattr(iterator, _DATASET, None)
        if can_hash_samples(dataset):
            self._tap = SampleTap(samples_per_rank(len(members_of(process_set))))
            self._iterator, self._original = iterator, dataset
            setattr(iterator, _DATASET, self._tap.attach(dataset))

    def stop_collecting(self) -> None:
        """Lets `fit` read its dataset without collecting hashes."""
        if self._tap is not None:
            setattr(self._iterator, _DATASET, self._original)

    def finish(self) -> None:
        """Compares the samples of all ranks and stops collecting; all ranks call it.

        Logs a warning on the lowest rank if the data are not sharded.
        """
        own = tf.zeros([0], tf.int64)
        if self._tap is not None:
            own = tf.constant(self._tap.hashes())
        self.stop_collecting()
        ranks = tf.fill([tf.size(own)], tf.constant(runtime.rank(), tf.int64))
        rows = allgather(
            tf.stack([ranks, own], 1),
            name="check of the first batches",
            process_set=self._ranks,
        ).numpy()
        members = members_of(self._ranks)
        if runtime.rank() != members[0]:
            return
        hashes = [rows[rows[:, 0] == rank, 1] for rank in members]
        if not have_shared_samples(hashes):
            return
        place, count = common_samples(hashes)
        _logger.warning(
            "The ranks train on the same data: %d of rank %d's first %d samples in "
            "this epoch were also used by other ranks, so samples are used up to %d "
            "times per epoch. Shard the data with tfdist.data.shard((x, y), "
            "batch_size=..., shuffle=True). For a tf.data.Dataset, call "
            "dataset.shard(tfdist.size(), tfdist.rank()) before you shuffle and batch.",
            count,
            members[place],
            len(hashes[place]),
            len(members),
        )
