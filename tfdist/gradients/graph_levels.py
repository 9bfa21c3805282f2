"""When the gradients of a traced function can be made, read off its graph.

An operation runs when its inputs are there. The longest way that leads to a gradient
says how many operations have to run one after the other before it: its level. Levels
need no step to have run, no operation of their own and no second trace, and are the
same on all ranks that trace the same program.

What is called eagerly has all its gradients before the first one is reduced, and so
has what XLA compiles: there is no order to be read, nor one that would matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def levels_of(tensors: Sequence[Any]) -> list[int | None]:
    """The level of each tensor in the graph that is being traced.

    Args:
        tensors: tensors of that graph; what comes from outside has none.
    """
    graph = tf.compat.v1.get_default_graph()
    levels: dict[Any, int] = {}
    # They are in the order in which they were made, so inputs come first (but for the
    # back edges of loops of TensorFlow 1, which count for nothing).
    for op in graph.get_operations():
        before = [levels.get(tensor.op, 0) for tensor in op.inputs]
        before += [levels.get(other, 0) for other in op.control_inputs]
        levels[op] = 1 + max(before, default=0)
    return [
        levels.get(tensor.op) if tf.is_symbolic_tensor(tensor) else None
        for tensor in tensors
    ]
