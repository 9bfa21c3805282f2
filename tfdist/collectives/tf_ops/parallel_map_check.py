"""Rejects operations in functions that tf.data calls several times concurrently.

Operations of the ranks are matched by name, and operations with the same name by the
order of their calls (`op_names`). A function passed to `Dataset.map(...,
num_parallel_calls=n)` is called for n elements concurrently, in an order that differs
between the ranks.
"""

from __future__ import annotations

import sys

import tensorflow as tf


@tf.autograph.experimental.do_not_convert
def check_not_parallel() -> None:
    """Raises if a collective is called in a function that will run in parallel.

    This is a function passed to `map` or `interleave` with `num_parallel_calls`. If
    it calls a `tf.function` that was traced earlier, collectives in the `tf.function`
    are not detected.

    Raises:
        ValueError: the function will run in parallel; the message shows how to write
            the call of `map` or `interleave`.
    """
    graph = tf.compat.v1.get_default_graph()
    while not str(getattr(graph, "name", "")).startswith("Dataset_"):
        graph = getattr(graph, "outer_graph", None)
        if graph is None:
            return
    frame = sys._getframe(1)
    while frame is not None:
        if _makes_parallel(frame.f_code.co_name, frame.f_locals):
            raise ValueError(
                "An operation of tfdist was called in a function of Dataset.map or "
                "interleave with num_parallel_calls. The function is called for "
                "several elements at once, in a different order on each rank, so "
                "different elements would be combined. Omit num_parallel_calls in this "
                "step, or call the operation outside of the dataset."
            )
        frame = frame.f_back  # type: ignore[assignment]


def _makes_parallel(function: str, names: dict[str, object]) -> bool:
    """Returns whether a frame creates a dataset that calls functions concurrently."""
    dataset = type(names.get("self")).__name__
    is_parallel = dataset in ("_ParallelMapDataset", "_ParallelInterleaveDataset")
    calls = names.get("num_parallel_calls")
    is_one = isinstance(calls, int) and calls == 1
    return function == "__init__" and is_parallel and not is_one
