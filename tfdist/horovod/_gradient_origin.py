"""Determines whether the gradients of an optimizer step were reduced."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.per_rank_variables import is_declared, tf_variable
from tfdist.core.registry import WeakRegistry
from tfdist.gradients.graph_walk import around, key_of, origins
from tfdist.gradients.provenance import is_from_tape, values_of

_REDUCTIONS = frozenset(
    {
        *("TfdistAllreduce", "TfdistReduce", "TfdistReduceScatter"),
        "TfdistReduceGroup",
    }
)
_CONSTANT = frozenset({"Const", "NoOp", "TfdistTopology"})
# Gradients computed by a tape or optimizer on this rank: the eager tensors, and for
# each graph the names of the symbolic tensors.
_local_tensors: WeakRegistry[bool] = WeakRegistry()
_local_names: WeakRegistry[set[str]] = WeakRegistry()
# Variables whose gradients are reduced over only some of the ranks.
_trained_in_subsets: WeakRegistry[bool] = WeakRegistry()


class Found(enum.Enum):
    """Origin of gradients, as far as the graph shows it."""

    REDUCED = enum.auto()  # computed from the result of a reduction
    MIXED = enum.auto()  # REDUCED and LOCAL, with no gradient from reductions alone
    LOCAL = enum.auto()  # computed on this rank, without a reduction
    UNKNOWN = enum.auto()  # e.g. read from variables, or arguments of a function


def note_local(grads: Iterable[Any]) -> None:
    """Records gradients that a tape or optimizer has computed on this rank.

    Args:
        grads: tensors and `tf.IndexedSlices`; other values are ignored.
    """
    for grad in grads:
        values = values_of(grad)
        if tf.is_symbolic_tensor(values):
            names = _local_names.get(values.graph) or set()
            names.add(values.name)
            _local_names.set(values.graph, names)
        elif isinstance(values, tf.Tensor):
            _local_tensors.set(values, True)


def note_subset(variables: Iterable[Any]) -> None:
    """Records variables that only a subset of the ranks trains, so they may differ."""
    for variable in variables:
        _trained_in_subsets.set(tf_variable(variable), True)


def may_differ(variable: Any) -> bool:
    """Returns whether a variable is local, or trained by a subset of the ranks."""
    return is_declared(variable) or tf_variable(variable) in _trained_in_subsets


def find(grads: Sequence[Any]) -> Found:
    """Returns whether gradients were reduced, as far as the graph shows it.

    Eager gradients are recorded when a tape returns them. Symbolic gradients are traced
    back through the inputs of operations, the values that functions capture, and the
    functions that operations call.

    Gathered values count as reduced only if the gradients are computed from them and
    constants alone: a loss computed from gathered labels does not reduce the
    gradients. Dividing gradients by a reduced number does not reduce them either.
    Therefore, if both reductions and unreduced gradients are found, the result is
    `REDUCED` only if at least one gradient is computed from reductions and from no
    unreduced gradient. (The remaining gradients may differ between ranks on purpose.)

    Args:
        grads: the gradients of one step: tensors and `tf.IndexedSlices`.
    """
    starts = [values_of(g) for g in grads]
    if not any(map(tf.is_symbolic_tensor, starts)):
        if not tf.executing_eagerly():
            return Found.UNKNOWN  # eager tensors, captured while a step is traced
        if all(map(is_from_tape, grads)):
            return Found.REDUCED
        are_local = all(v in _local_tensors for v in starts)
        return Found.LOCAL if are_local else Found.UNKNOWN
    symbolic = [t for t in starts if tf.is_symbolic_tensor(t)]
    met, gathers = _met(symbolic)
    if len(symbolic) < len(starts):
        met.add(Found.UNKNOWN)
    if met >= {Found.REDUCED, Found.LOCAL}:
        for tensor in symbolic:
            if _met([tensor])[0] & {Found.REDUCED, Found.LOCAL} == {Found.REDUCED}:
                return Found.REDUCED
        return Found.MIXED
    if Found.REDUCED in met or (gathers and _all_gathered(symbolic)):
        return Found.REDUCED
    if Found.LOCAL in met or Found.UNKNOWN not in met:
        return Found.LOCAL
    return Found.UNKNOWN


def _met(tensors: Sequence[Any]) -> tuple[set[Found], bool]:
    """Returns the origins of symbolic tensors, and whether a gather was found.

    An origin is a reduction (`REDUCED`), a gradient computed on this rank (`LOCAL`), or
    a variable or argument (`UNKNOWN`).
    """
    own_graphs = list(around(tf.compat.v1.get_default_graph()))
    met: set[Found] = set()
    gathers = False

    def look(tensor: Any) -> bool:
        nonlocal gathers
        operation = tensor.op
        if operation.type in _REDUCTIONS:
            met.add(Found.REDUCED)
            return False
        gathers |= operation.type == "TfdistAllgather"
        if tensor.name in (_local_names.get(tensor.graph) or ()):
            met.add(Found.LOCAL)
            return False
        if operation.type in ("ReadVariableOp", "ResourceGather", "VariableV2"):
            met.add(Found.UNKNOWN)
            return False
        # For a placeholder of a called function, the inputs of the call are visited.
        if operation.type == "Placeholder" and tensor.graph in own_graphs:
            if not any(tf.is_symbolic_tensor(t) for t in origins(tensor)):
                met.add(Found.UNKNOWN)
        return True

    _walk(tensors, look)
    return met, gathers


def _walk(tensors: Iterable[Any], look: Callable[[Any], bool]) -> None:
    """Calls `look` once for each tensor; follows its inputs if `look` returns true."""
    seen: set[tuple[int, str]] = set()
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if key_of(tensor) in seen:
            continue
        seen.add(key_of(tensor))
        if look(tensor):
            waiting += origins(tensor)


def _all_gathered(tensors: Iterable[Any]) -> bool:
    """Returns whether gradients are computed from gathered values and constants."""
    others = False

    def look(tensor: Any) -> bool:
        nonlocal others
        if tensor.op.type == "TfdistAllgather":
            return False
        before = origins(tensor)
        others |= not before and tensor.op.type not in _CONSTANT
        return True

    _walk(tensors, look)
    return not others
