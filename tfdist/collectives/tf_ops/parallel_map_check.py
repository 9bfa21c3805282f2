"""Refuses operations in functions that tf.data calls several times at once.

Operations of the ranks are paired by their name, and those of one name in the order of
their calls (`op_names`). A function of `Dataset.map(..., num_parallel_calls=n)` is
called for n elements at the same time, in an order that differs between the ranks.
"""

from __future__ import annotations

import sys

import tensorflow as tf


@tf.autograph.experimental.do_not_convert
def check_not_parallel() -> None:
    """Raises if a function is being traced that is called for several elements at once.

    A function that was traced before, and is called in one of these, is not seen.

    Raises:
        ValueError: the message has the correct form.
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
                "interleave with num_parallel_calls: it is called for several elements "
                "at once, in another order on each rank, so that different elements "
                "would be combined. Leave num_parallel_calls out of this step, or call "
                "the operation outside of the dataset."
            )
        frame = frame.f_back  # type: ignore[assignment]


def _makes_parallel(function: str, names: dict[str, object]) -> bool:
    """Whether a frame is the constructor of a dataset that calls functions at once."""
    dataset = type(names.get("self")).__name__
    is_parallel = dataset in ("_ParallelMapDataset", "_ParallelInterleaveDataset")
    calls = names.get("num_parallel_calls")
    is_one = isinstance(calls, int) and calls == 1
    return function == "__init__" and is_parallel and not is_one
