"""Detects ranks that train on the same samples because the data were not sharded.

The samples of a rank's first batches are hashed as they leave the input pipeline, and
the ranks compare the hashes at the end of the first epoch. If the ranks shuffle one
data set of N samples independently, about n^2 / N of n samples are in common. If each
rank has its own part, none are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Largest number of hashes that are compared: of all ranks together (more if every rank
# has the minimum of 64), and of one rank.
_MAX_HASHES = 1 << 16
_MAX_HASHES_OF_A_RANK = 4096
_MIN_PAIRS = 3
# If the data contain duplicates, they also occur within a rank, at about the same rate.
_MIN_RATE_RATIO = 4.0


def samples_per_rank(size: int) -> int:
    """Returns how many samples each of `size` ranks hashes."""
    return max(64, min(_MAX_HASHES_OF_A_RANK, _MAX_HASHES // size))


def have_shared_samples(hashes: Sequence[np.ndarray]) -> bool:
    """Returns whether ranks share more samples than duplicates in the data explain.

    Args:
        hashes: for each rank, the int64 hashes of its samples in one epoch.

    Returns:
        True if so; False also if there are too few samples to decide.

    Example:
        >>> import numpy as np
        >>> have_shared_samples([np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])])
        True
        >>> have_shared_samples([np.array([1, 3, 5, 7]), np.array([2, 4, 6, 8])])
        False
        >>> have_shared_samples([np.zeros(4, int), np.zeros(4, int)])
        False
    """
    # Count ordered pairs. Summing squares counts the pairs of equal samples.
    sizes = [len(own) for own in hashes]
    equal_within = sum(_equal_pairs(own) for own in hashes)
    equal_across = _equal_pairs(np.concatenate(hashes)) - equal_within
    pairs_within = sum(n * n for n in sizes)
    pairs_across = sum(sizes) ** 2 - pairs_within
    if equal_across < 2 * _MIN_PAIRS:
        return False
    # Exclude the pairs of a sample with itself.
    rate_within = (equal_within - sum(sizes)) / max(1, pairs_within - sum(sizes))
    return bool(equal_across / pairs_across > _MIN_RATE_RATIO * rate_within)


def common_samples(hashes: Sequence[np.ndarray]) -> tuple[int, int]:
    """Returns the rank that shares the most samples with others, and how many.

    Args:
        hashes: as in `have_shared_samples`, for at least two ranks.
    """
    counts = []
    for rank, own in enumerate(hashes):
        others = np.concatenate([other for r, other in enumerate(hashes) if r != rank])
        counts.append(int(np.isin(own, others).sum()))
    rank = int(np.argmax(counts))
    return rank, counts[rank]


def _equal_pairs(hashes: np.ndarray) -> int:
    return int((np.unique(hashes, return_counts=True)[1].astype(np.int64) ** 2).sum())


class SampleTap:
    """Hashes the first samples of a dataset.

    Args:
        limit: number of samples that are hashed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hashes = tf.Variable(tf.zeros([limit], tf.int64), trainable=False)
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset with the same batches that also hashes their samples."""

        def hash_batch(*element: Any) -> Any:
            batch = element if isinstance(dataset.element_spec, tuple) else element[0]
            hashed = self._hash(batch)
            with tf.control_dependencies([hashed]):
                return tf.nest.map_structure(tf.identity, batch)

        return dataset.map(hash_batch)

    def hashes(self) -> np.ndarray:
        """Returns the int64 hashes of the samples so far; equal for equal samples."""
        return self._hashes[: int(self._count)].numpy()

    def _hash(self, element: Any) -> tf.Tensor:
        def keep() -> tf.Tensor:
            own = _sample_hashes(element)
            begin = self._count.read_value()
            own = own[: self._limit - begin]
            end = begin + tf.size(own, tf.int64)
            places = tf.range(begin, end)
            self._hashes.scatter_nd_update(places[:, tf.newaxis], own)
            self._count.assign(end)
            return end

        # The branch must return a value that depends on its updates, or they would not
        # run.
        return tf.cond(
            self._count < self._limit, keep, lambda: self._count.read_value()
        )


def can_hash_samples(dataset: Any) -> bool:
    """Returns whether a dataset yields batches of dense tensors that can be hashed."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    leaves = tf.nest.flatten(dataset.element_spec, expand_composites=False)
    return bool(leaves) and all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank not in (None, 0)
        for leaf in leaves
    )


def _sample_hashes(element: Any) -> tf.Tensor:
    """Returns an int64 hash of each sample, over all tensors of the batch."""
    rows = []
    for tensor in tf.nest.flatten(element):
        count = tf.shape(tensor)[0]
        width = tf.size(tensor) // tf.maximum(count, 1)  # a batch may be empty
        found = tf.fingerprint(tf.reshape(tensor, [count, width]))
        rows.append(tf.reshape(found, [count, 8]))
    return tf.bitcast(tf.fingerprint(tf.concat(rows, 1)), tf.int64)
