"""Finds ranks that train on the same samples: data that were not sharded.

The samples of a rank's first batches are hashed as they come out of the input pipeline,
and the ranks compare the hashes at the end of the first epoch. Ranks that shuffle one
data set of N samples each by itself have about n^2 / N of n samples in common; ranks
with parts of it have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# So many hashes are exchanged at most, over all ranks; and of each.
_MOST_SAMPLES = 1 << 16
_MOST_OF_A_RANK = 4096
_FEWEST_PAIRS = 3
# Data with equal samples have them within a rank, too: about as often.
_OFTENER_THAN_WITHIN = 4.0


def samples_to_keep(size: int) -> int:
    """How many samples each of `size` ranks hashes."""
    return max(64, min(_MOST_OF_A_RANK, _MOST_SAMPLES // size))


def are_shared(hashes: Sequence[np.ndarray]) -> bool:
    """Whether ranks have more samples in common than equal samples explain.

    Args:
        hashes: for each rank those of its samples in one epoch, int64.

    Returns:
        False also where there are too few to tell.

    Example:
        >>> import numpy as np
        >>> are_shared([np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])])
        True
        >>> are_shared([np.array([1, 3, 5, 7]), np.array([2, 4, 6, 8])])
        False
        >>> are_shared([np.zeros(4, int), np.zeros(4, int)])
        False
    """
    # Numbers of ordered pairs: a sum of squares counts those of equal samples.
    sizes = [len(own) for own in hashes]
    equal_within = sum(_equal_pairs(own) for own in hashes)
    equal_across = _equal_pairs(np.concatenate(hashes)) - equal_within
    pairs_within = sum(n * n for n in sizes)
    pairs_across = sum(sizes) ** 2 - pairs_within
    if equal_across < 2 * _FEWEST_PAIRS:
        return False
    # Each sample is equal to itself, which says nothing.
    rate_within = (equal_within - sum(sizes)) / max(1, pairs_within - sum(sizes))
    return bool(equal_across / pairs_across > _OFTENER_THAN_WITHIN * rate_within)


def common_samples(hashes: Sequence[np.ndarray]) -> tuple[int, int]:
    """The rank with the most samples that others have too, and how many.

    Args:
        hashes: as in `are_shared`, of at least two ranks.
    """
    counts = []
    for rank, own in enumerate(hashes):
        others = np.concatenate([some for r, some in enumerate(hashes) if r != rank])
        counts.append(int(np.isin(own, others).sum()))
    rank = int(np.argmax(counts))
    return rank, counts[rank]


def _equal_pairs(hashes: np.ndarray) -> int:
    return int((np.unique(hashes, return_counts=True)[1].astype(np.int64) ** 2).sum())


class SampleTap:
    """Hashes the first samples that come out of a dataset.

    Args:
        most: how many samples are hashed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes = tf.Variable(tf.zeros([most], tf.int64), trainable=False)
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def on(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches in the same order, each looked at as it passes."""

        def look(*element: Any) -> Any:
            whole = element if isinstance(dataset.element_spec, tuple) else element[0]
            seen = self._look(whole)
            with tf.control_dependencies([seen]):
                return tf.nest.map_structure(tf.identity, whole)

        return dataset.map(look)

    def hashes(self) -> np.ndarray:
        """Those of the samples so far, int64; of equal samples equal ones."""
        return self._hashes[: int(self._count)].numpy()

    def _look(self, element: Any) -> tf.Tensor:
        def keep() -> tf.Tensor:
            own = _sample_hashes(element)
            begin = self._count.read_value()
            own = own[: self._most - begin]
            end = begin + tf.size(own, tf.int64)
            places = tf.range(begin, end)
            self._hashes.scatter_nd_update(places[:, tf.newaxis], own)
            self._count.assign(end)
            return end

        # Not the count alone: a branch has to be run for its effect.
        return tf.cond(self._count < self._most, keep, lambda: self._count.read_value())


def can_be_looked_at(dataset: Any) -> bool:
    """Whether a dataset gives batches of dense tensors, as `SampleTap` hashes them."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    leaves = tf.nest.flatten(dataset.element_spec, expand_composites=False)
    return bool(leaves) and all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank not in (None, 0)
        for leaf in leaves
    )


def _sample_hashes(element: Any) -> tf.Tensor:
    """One int64 hash for each sample of a batch, of all its tensors together."""
    rows = []
    for tensor in tf.nest.flatten(element):
        count = tf.shape(tensor)[0]
        width = tf.size(tensor) // tf.maximum(count, 1)  # a batch may be empty
        found = tf.fingerprint(tf.reshape(tensor, [count, width]))
        rows.append(tf.reshape(found, [count, 8]))
    return tf.bitcast(tf.fingerprint(tf.concat(rows, 1)), tf.int64)
