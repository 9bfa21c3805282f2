"""Computes the order in which the gradients of a traced function become ready.

An operation runs when its inputs are available. The level of a gradient is the number
of operations that have to run one after another to compute it, i.e. the length of the
longest path to it in the graph. Levels can be computed without running a step, adding
operations or tracing again. They are equal on all ranks that trace the same program.

In eager mode, and in functions that XLA compiles, all gradients exist before the first
one is reduced, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def levels_of(tensors: Sequence[Any]) -> list[int | None]:
    """Returns the level of each tensor in the graph that is being traced.

    Args:
        tensors: tensors of the graph. The level of an eager tensor, or of a tensor of a
            different graph, is None.
    """
    graph = tf.compat.v1.get_default_graph()
    levels: dict[Any, int] = {}
    # Operations are in creation order, so inputs come first (except for the back edges
    # of TensorFlow 1 loops, which are ignored).
    for op in graph.get_operations():
        before = [levels.get(tensor.op, 0) for tensor in op.inputs]
        before += [levels.get(other, 0) for other in op.control_inputs]
        levels[op] = 1 + max(before, default=0)
    return [
        levels.get(tensor.op) if tf.is_symbolic_tensor(tensor) else None
        for tensor in tensors
    ]
