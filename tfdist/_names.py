"""Default names of operations: the same on every rank, and at every retrace.

The core pairs operations of different ranks by name, so a name must not hold what
differs between ranks or traces (TensorFlow's node names do). A name is made of the
traced functions around the call and a count inside each, for example
"train_step/while_body/allreduce.2".

Eager calls all have one name for each kind, "allreduce.eager": they follow each
other in the order of the program, and TensorFlow keeps a kernel for every name.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import tensorflow as tf

_COUNTS = "_tfdist_name_counts"  # attribute of a graph: base name → uses so far
_LABEL = "_tfdist_label"  # attribute of a graph: its place, e.g. "train_step/cond_true"


def operation_name(
    kind: str, name: str | None, *, process_set: int = 0, partner: str = ""
) -> str:
    """The name of an operation that is called here.

    Args:
        kind: "allreduce", "broadcast", ...
        name: the user's name; None picks one.
        process_set: number of the set of ranks that call it; default all. Calls of
            other sets are counted apart, which not all ranks make.
        partner: counts the calls with different partners apart.

    Returns:
        In eager mode `name`, or "<kind>.eager". In a graph the name with the
        function it is in, and with a count where it is used a second time.
    """
    if tf.executing_eagerly():
        return name or f"{kind}.eager"
    graph = tf.compat.v1.get_default_graph()
    uses = _count(graph, f"{process_set} {name or kind}{partner}")
    if name is None:
        return f"{_label(graph)}/{kind}.{uses}"
    return name if uses == 0 else f"{name}.{uses}"


def place_of(graph: Any) -> str:
    """The traced functions around a call, e.g. "train_step/cond_true".

    The same however often they are traced, unlike what names begin with.
    """
    outer = getattr(graph, "outer_graph", None)
    if outer is None or not getattr(outer, "name", None):
        return _own_name(graph)
    return f"{place_of(outer)}/{_own_name(graph)}"


def _label(graph: Any) -> str:
    known = getattr(graph, _LABEL, None)
    if known is not None:
        return str(known)
    own = _own_name(graph)
    outer = getattr(graph, "outer_graph", None)
    label = own
    if outer is not None and getattr(outer, "name", None):
        uses = _count(outer, own + "/")
        label = f"{_label(outer)}/{own}" + (f".{uses}" if uses else "")
    setattr(graph, _LABEL, label)
    return label


def _own_name(graph: Any) -> str:
    name = getattr(graph, "name", None) or "graph"
    # Branches, loop bodies and backward functions are numbered by what TensorFlow has
    # traced before, which differs between ranks; functions of the user are not.
    if type(graph).__name__ != "FuncGraph" or name.startswith("__"):
        name = re.sub(r"_\d+(?=_|$)", "", name)
    return str(name).strip("_")


def _count(graph: Any, key: str) -> int:
    counts = getattr(graph, _COUNTS, None)
    if counts is None:
        counts = Counter()
        setattr(graph, _COUNTS, counts)
    counts[key] += 1
    return int(counts[key] - 1)
