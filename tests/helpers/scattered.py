"""What the tests of tfdist.data.scatter read, and how they compare it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist

END_S = 10.0


def read(rank: int) -> tf.data.Dataset:
    """Batches of a dict, shuffled anew in each epoch, the last one smaller."""
    numbers = np.arange(23)
    samples = {
        "x": numbers[:, None] * np.float32([1.0, 0.5]),
        "text": np.array([b"%d" % 7**n for n in numbers], object),
    }
    return tfdist.data.shard(
        samples, batch_size=3, shuffle=True, seed=5, rank=rank, size=tfdist.size()
    )


def elements(dataset: tf.data.Dataset) -> list[Any]:
    """All of them, as NumPy arrays."""
    return [tf.nest.map_structure(lambda x: x.numpy(), one) for one in dataset]


def same(found: Any, expected: Any) -> None:
    """Structure, types, shapes and bits."""
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)


def equal(
    function: Callable[[int], tf.data.Dataset], epochs: int = 2, **options: Any
) -> tf.data.Dataset:
    """Checks that scatter gives this rank what `function` does."""
    tf.random.set_seed(1)  # part of every seed, so it has to be equal on all ranks
    scattered = tfdist.data.scatter(function, **options)
    own = function(tfdist.rank())
    assert scattered.element_spec == own.element_spec
    assert int(scattered.cardinality()) == int(own.cardinality())
    for _ in range(epochs):
        same(elements(scattered), elements(own))
    return scattered


def open_threads(number: int) -> list[str]:
    """The threads of iterations that are open here, when they are so many, or later."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        gc.collect()
        found = [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(("tfdist-reading-for", "tfdist-receiving"))
        ]
        if len(found) == number:
            break
        time.sleep(0.01)
    return found
