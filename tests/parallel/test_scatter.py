"""Few ranks read for all: every rank gets what it would have read itself."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist


def read(rank):
    """Batches of a dict, shuffled anew in each epoch, the last one smaller."""
    numbers = tf.range(23, dtype=tf.int64)
    words = tf.strings.as_string(numbers * numbers)
    samples = {"x": tf.cast(numbers, tf.float32)[:, None] * [1.0, 0.5], "text": words}
    return tfdist.data.shard(
        {k: v.numpy() for k, v in samples.items()},
        batch_size=3,
        shuffle=True,
        seed=5,
        rank=rank,
        size=tfdist.size(),
    )


def elements(dataset, epochs=1):
    return [
        [tf.nest.map_structure(lambda x: x.numpy(), one) for one in dataset]
        for _ in range(epochs)
    ]


def same(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(a, b)
        assert type(a) is type(b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0)


def two_epochs(readers):
    scattered = tfdist.data.scatter(read, readers=readers)
    own = read(tfdist.rank())
    assert scattered.element_spec == own.element_spec
    assert int(scattered.cardinality()) == int(own.cardinality())
    same(elements(scattered, 2), elements(own, 2))
    tfdist.barrier()
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shuffled_batches_are_those_of_reading_oneself(size):
    for readers in range(1, size + 1):
        assert run_ranks(two_epochs, size, readers) == [True] * size
