"""Tracks gradients that a DistributedGradientTape has already reduced.

This lets a DistributedOptimizer detect gradients that would be reduced twice.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.core.process_sets import ProcessSet, id_of
from tfdist.core.registry import WeakRegistry
from tfdist.gradients.graph_walk import key_of, origins
from tfdist.gradients.options import ReduceOptions

_logger = logging.getLogger("tfdist")

# A reduction by a tape: the id of the process set, and whether it was a sum.
_Reduction = tuple[int, bool]
_of_eager_tensors: WeakRegistry[_Reduction] = WeakRegistry()
# For each graph: the reductions of its tensors, by tensor name.
_of_graphs: WeakRegistry[dict[str, _Reduction]] = WeakRegistry()
# Maximum number of tensors to search between an optimizer and a tape. Clipping and
# scaling create only a few.
_BETWEEN = 64


def values_of(grad: Any) -> Any:
    """Returns the tensor of a gradient; for `tf.IndexedSlices`, the values."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def note_tape(
    grads: Iterable[Any], process_set: ProcessSet | None, op: ReduceOp
) -> None:
    """Records that a DistributedGradientTape has reduced these gradients."""
    how = id_of(process_set), op is ReduceOp.SUM
    for grad in grads:
        if grad is None:
            continue
        values = values_of(grad)
        if tf.is_symbolic_tensor(values):
            of_graph = _of_graphs.get(values.graph) or {}
            of_graph[values.name] = how
            _of_graphs.set(values.graph, of_graph)
        elif isinstance(values, tf.Tensor):
            _of_eager_tensors.set(values, how)


def is_from_tape(grad: Any) -> bool:
    """Returns whether a DistributedGradientTape has reduced a gradient.

    In a graph, this includes gradients that were clipped or scaled after the reduction.
    """
    return _reduction_by_tape(values_of(grad)) is not None


def check_reduced_once(grads: Iterable[Any], options: ReduceOptions, name: str) -> None:
    """Raises if an optimizer would sum gradients that a tape has already summed.

    If the tape or the optimizer averages, the second reduction is only redundant. In
    this case, a warning is logged once.

    Args:
        grads: gradients passed to the optimizer.
        options: options with which the optimizer reduces the gradients.
        name: name of the optimizer.

    Raises:
        ValueError: tape and optimizer both sum over the same ranks, so the result would
            be too large by a factor of the number of ranks.
    """
    members = id_of(options.process_set)
    found = {_reduction_by_tape(values_of(g)) for g in grads if g is not None}
    found &= {(members, True), (members, False)}
    if not found:
        return
    twice = (
        f"The gradients of optimizer {name!r} are reduced twice: by a "
        "DistributedGradientTape and by DistributedOptimizer"
    )
    remove = (
        "Use only one of the two. In a custom loop with tape.gradient() and "
        "optimizer.apply(), keep the DistributedGradientTape and use the optimizer "
        "without DistributedOptimizer"
    )
    if options.op is ReduceOp.SUM and (members, True) in found:
        raise ValueError(
            f"{twice}, both with op=Sum. The result would be too large by a factor of "
            f"the number of ranks. {remove}."
        )
    warn_once(f"{twice}. One of the reductions is redundant and costs time. {remove}.")


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Logs a warning once per process."""
    _logger.warning("%s", text)


def _reduction_by_tape(tensor: Any) -> _Reduction | None:
    """Returns how a tape has reduced a tensor, or None if no tape has."""
    if not tf.is_symbolic_tensor(tensor):
        return _of_eager_tensors.get(tensor)
    seen: set[tuple[int, str]] = set()
    waiting = collections.deque([tensor])
    while waiting and len(seen) < _BETWEEN:
        one = waiting.popleft()
        if key_of(one) in seen:
            continue
        seen.add(key_of(one))
        how = (_of_graphs.get(one.graph) or {}).get(one.name)
        if how is not None:
            return how
        # Clipping and scaling keep the shape, so skip tensors of different shapes.
        waiting += [t for t in origins(one) if _same_shape(t, tensor)]
    return None


def _same_shape(one: Any, other: Any) -> bool:
    known: bool = one.shape.rank is not None and other.shape.rank is not None
    return known and one.shape.as_list() == other.shape.as_list()
