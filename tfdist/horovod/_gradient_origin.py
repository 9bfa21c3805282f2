"""Where the gradients of an optimizer step come from."""

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
# Gradients as a tape or optimizer has computed them: eager tensors, and the names of
# symbolic ones by their graphs.
_local_tensors: WeakRegistry[bool] = WeakRegistry()
_local_names: WeakRegistry[set[str]] = WeakRegistry()
# Variables whose gradients are reduced over some of the ranks only.
_trained_in_subsets: WeakRegistry[bool] = WeakRegistry()


class Found(enum.Enum):
    """The origin of gradients, as far as the graph shows it."""

    REDUCED = enum.auto()  # a reduction is among what they are computed from
    MIXED = enum.auto()  # each from one, and from gradients that were not reduced
    LOCAL = enum.auto()  # no reduction is there, and they are computed here
    UNKNOWN = enum.auto()  # they come from elsewhere


def note_local(grads: Iterable[Any]) -> None:
    """Remembers gradients that a tape or optimizer has computed on this rank.

    Args:
        grads: tensors, `tf.IndexedSlices`, and others, which are left out.
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
    """Remembers variables that not all ranks train together: they may differ."""
    for variable in variables:
        _trained_in_subsets.set(tf_variable(variable), True)


def may_differ(variable: Any) -> bool:
    """Whether a variable is local to each rank, or trained by some of the ranks."""
    return is_declared(variable) or tf_variable(variable) in _trained_in_subsets


def find(grads: Sequence[Any]) -> Found:
    """Whether gradients were reduced, as far as that is known.

    Eager gradients are known as they come out of a tape. Symbolic ones are followed
    back through the inputs of operations, what functions have captured from outside,
    and the functions that operations call. What was gathered
    is reduced where gradients consist of nothing else: labels of all ranks, of which a
    loss is computed, reduce nothing. Nor does a reduced number by which gradients are
    divided: where reductions and gradients of this rank are found, one gradient must
    be of reductions alone. (Others may be meant to differ between the ranks.)

    Args:
        grads: of one step: tensors and `tf.IndexedSlices`.
    """
    starts = [values_of(g) for g in grads]
    if not any(map(tf.is_symbolic_tensor, starts)):
        if not tf.executing_eagerly():
            return Found.UNKNOWN  # captured by a step that is traced
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
    """Returns the origins of symbolic tensors, and whether a gather is on the way.

    The origins are reductions, gradients of this rank, and tensors from elsewhere.
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
        # Those of functions that are called are found among the inputs of the call.
        if operation.type == "Placeholder" and tensor.graph in own_graphs:
            if not any(tf.is_symbolic_tensor(t) for t in origins(tensor)):
                met.add(Found.UNKNOWN)
        return True

    _walk(tensors, look)
    return met, gathers


def _walk(tensors: Iterable[Any], look: Callable[[Any], bool]) -> None:
    """Looks at each tensor once, and behind those of which `look` returns true."""
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
    """Whether gradients are made of gathered values alone."""
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
