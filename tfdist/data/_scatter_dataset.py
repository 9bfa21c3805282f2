"""TensorFlow dataset of the elements that a reader sends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.core import runtime
from tfdist.data._scatter_client import Iteration, Receivers, Source


def dataset(
    source: Source,
    spec: Any,
    cardinality: int,
    *,
    prefetch: int,
    on_deleted: Callable[[], None],
) -> tf.data.Dataset:
    """Returns a dataset of the elements that a reader sends.

    The reader sends elements in blocks (`_element_codec`).

    Args:
        source: the reader.
        spec: element_spec of the dataset.
        cardinality: cardinality of the reader's dataset; may be unknown or infinite.
        prefetch: number of elements that TensorFlow prefetches.
        on_deleted: function that is called, in any thread, when no further iteration
            can begin.
    """
    flat = [one for one in tf.nest.flatten(spec)]
    dtypes = [one.dtype for one in flat]
    empty = [_empty(one) for one in flat]
    receivers = runtime.get_resource("data/receivers", Receivers)
    numbers = _IteratorNumbers()

    def blocks(token: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        if runtime.generation() != source.generation:
            _raise_stale()
        iteration = Iteration(source, lambda: numbers.of(int(token)), dtypes)
        receivers.add(iteration)
        try:
            while (block := iteration.next_block()) is not None:
                yield tuple(block or empty)
        finally:
            iteration.close()

    signature = tuple(
        tf.TensorSpec(tf.TensorShape([None]).concatenate(one.shape), one.dtype)
        for one in flat
    )

    def unbatch_block(*parts: tf.Tensor) -> tf.data.Dataset:
        # unbatch() is not used, because it aborts the process if elements have no
        # bytes (TensorFlow 2.21). Slices share the buffer of their block.
        element = tf.nest.pack_sequence_as(spec, parts)
        return tf.data.Dataset.from_tensor_slices(element)

    found = (
        numbers.tokens()
        .flat_map(
            lambda token: tf.data.Dataset.from_generator(
                blocks, args=(token,), output_signature=signature
            )
        )
        .flat_map(unbatch_block)
    )
    if cardinality != tf.data.UNKNOWN_CARDINALITY:
        found = found.apply(tf.data.experimental.assert_cardinality(cardinality))
    found = found.prefetch(prefetch)
    # Iterators, and datasets that are made from this one, refer to it.
    weakref.finalize(found, on_deleted).atexit = False
    return found


def _empty(spec: tf.TensorSpec) -> np.ndarray:
    rank = spec.shape.rank
    shape = [] if rank is None else [dim or 0 for dim in spec.shape.as_list()]
    return np.empty([0, *shape], spec.dtype.as_numpy_dtype)


def _raise_stale() -> NoReturn:
    raise RuntimeError(
        "this dataset was created by tfdist.data.scatter before tfdist.shutdown(); "
        "call scatter again on all ranks after tfdist.init()"
    )


class _IteratorNumbers:
    """The numbers of a dataset's iterators, in the order of their creation.

    Creating an iterator runs no code of tfdist, but TensorFlow draws a new seed for
    each random part of the dataset. Two equal random datasets draw the same sequence of
    seeds. One of them is part of the dataset and gives each iterator a random number,
    its token. This class iterates over the second one to find out which token was drawn
    first, second, and so on.
    """

    def __init__(self) -> None:
        self._twin = self.tokens()
        self._drawn: dict[int, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def tokens() -> tf.data.Dataset:
        """Returns a dataset of one number, the token, redrawn by each iterator."""
        numbers = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True)
        return numbers.take(1)

    def of(self, token: int) -> int:
        """Returns the number, from 0 on, of the iterator that has drawn `token`."""
        with self._lock:
            while token not in self._drawn:
                drawn = int(next(iter(self._twin)))
                self._drawn[drawn] = len(self._drawn)
            return self._drawn[token]
