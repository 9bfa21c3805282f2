"""Agreement of the ranks on a list of gradients before they reduce it.

The lists are compared by `collectives.signature`. Which of the gradients are `None` may
differ between ranks.

A gradient that is `None` on all ranks is not reduced and stays `None`. In a graph this
is fixed at tracing time. In eager mode each call may have different gradients on each
rank, so there are two cases:

- If all ranks had all gradients in the first call, a later `None` is treated as zeros.
- If any rank lacked a gradient, every call starts with a small message in which the
  ranks exchange which gradients they have. Each combination forms a separate group.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence

import tensorflow as tf

from tfdist import collectives
from tfdist.collectives.signature import find_registered, register, renamed_layers
from tfdist.collectives.tf_ops.op_names import place_of
from tfdist.core import native, runtime
from tfdist.core.process_sets import ProcessSet, id_of, members_of
from tfdist.gradients.ready_order import bits_of, order_from

# Place of a group's reduction in its options: inside XLA, or one operation per bucket.
BY_XLA = "by=xla"
BY_OPERATIONS = "by=operations"
_PLACE = re.compile(r' call=\d+ in=([^\s"]+)')  # traced function, in the options
_CALLS = "tfdist/group_calls"  # graph collection: options of the groups in this graph


def agree_on_gradients(
    lines: Sequence[str],
    options: str,
    present: Sequence[bool],
    process_set: ProcessSet | None = None,
) -> tuple[str, list[bool]]:
    """Registers the gradients of a trace or of an eager call.

    Args:
        lines: one line for each variable: path, dtype and shape.
        options: one line that describes how they are reduced.
        present: for each line, whether this rank has a gradient.
        process_set: the ranks that reduce; default all.

    Returns:
        The id of the group to be reduced, and for each line, whether any rank has a
        gradient.

    Raises:
        tfdist.MismatchError: the lists or the options differ, or only some ranks
            retraced for gradients that were `None` on all ranks before. All ranks
            raise it.
    """
    if tf.executing_eagerly():
        return _agree_on_call(lines, options, list(present), process_set)
    return _agree_on_trace(lines, options, list(present), process_set)


def agree_on_order(
    order: Sequence[int], list_id: str, process_set: ProcessSet | None = None
) -> list[int] | None:
    """Broadcasts the lowest rank's order in which gradients go into buckets.

    The ranks may see different orders if one of them lacks a gradient, but need the
    same buckets. The order of a group never changes once it is agreed on.

    Args:
        order: this rank's proposal, which contains each gradient index once.
        list_id: id from `agree_on_gradients`, from the same trace on all ranks.
        process_set: the ranks that reduce; default all.

    Returns:
        The order, equal on all ranks; None if the lowest rank had already joined
        (`tfdist.join`).
    """
    lines, options = [f"order of group {list_id}"], "plan"
    bits = bits_of(order)
    seen = find_registered(lines, options, len(bits), process_set)
    if not seen:
        if members_of(process_set)[0] != runtime.rank():
            bits = [False] * len(bits)
        seen = _register(lines, options, bits, process_set)
    return order_from(seen[1], len(order))


def _agree_on_call(
    lines: Sequence[str],
    options: str,
    present: list[bool],
    process_set: ProcessSet | None,
) -> tuple[str, list[bool]]:
    options = f"{options} eager"
    seen = find_registered(lines, options, len(lines) + 1, process_set)
    # The extra entry says whether any rank lacks a gradient.
    list_id, (*found, gaps) = seen or _register(
        lines, options, [*present, not all(present)], process_set
    )
    if not gaps:
        return list_id, found
    if seen:  # else the ranks have just exchanged this
        found = _any_rank(
            present, f"gradients that are not None, list {list_id[:8]}", process_set
        )
    chosen = f"{options} gradients={_hexadecimal(found)}"
    return _register(lines, chosen, found, process_set)


def _agree_on_trace(
    lines: Sequence[str],
    options: str,
    present: list[bool],
    process_set: ProcessSet | None,
) -> tuple[str, list[bool]]:
    """Registers a trace; a gradient that no rank had before creates a new group.

    If only some ranks retrace, their new group does not match the buckets of the other
    ranks. All ranks then raise an error that shows both lists.
    """
    options = f"{options} {_call_number(options, lines, process_set)}"
    for number in itertools.count():
        own = f"{options} late_gradients={number}" if number else options
        seen = find_registered(lines, own, len(lines), process_set)
        if not seen:
            late = number > 0
            return _register(lines, own, present, process_set, late=late)
        if all(had or not has for had, has in zip(seen[1], present, strict=True)):
            return seen
    raise AssertionError


def _any_rank(
    present: list[bool], name: str, process_set: ProcessSet | None
) -> list[bool]:
    """Returns, for each gradient, whether any rank has one in this call."""
    if len(members_of(process_set)) == 1:
        return present
    found = collectives.allreduce(
        tf.constant(present),
        op=collectives.ReduceOp.LOGICAL_OR,
        name=name,
        process_set=process_set,
    )
    return [bool(one) for one in found.numpy()]


def _hexadecimal(flags: Sequence[bool]) -> str:
    return f"{sum(flag << place for place, flag in enumerate(flags)):x}"


def _register(
    lines: Sequence[str],
    options: str,
    flags: Sequence[bool],
    process_set: ProcessSet | None,
    *,
    late: bool = False,
) -> tuple[str, list[bool]]:
    return register(lines, options, flags, process_set, functools.partial(_hint, late))


def _hint(late: bool, error: native.CoreError) -> str:
    """Returns advice on how to fix lists of gradients that differ."""
    if BY_XLA in error.message and BY_OPERATIONS in error.message:
        return (
            "Only the ranks with by=xla reduce inside the function that XLA compiles. "
            "Run make xla on all hosts, or pass xla='off' to DistributedOptimizer on "
            "all ranks. The ranks' steps may also differ in operations that XLA "
            "cannot compile."
        )
    if late:
        return (
            "This rank has traced a function with a gradient that was None on all "
            "ranks before; all ranks have to trace it at the same step. Or use zeros "
            "from the first step on with tape.gradient(..., "
            "unconnected_gradients=tf.UnconnectedGradients.ZERO)."
        )
    places = set(_PLACE.findall(error.message))
    if len(places) > 1:
        return (
            f"The ranks have traced them in {' and in '.join(sorted(places))}: call"
            " the same functions in the same order on all ranks. If one rank first "
            "calls or traces a function separately (get_concrete_function), all "
            "ranks have to do so."
        )
    return renamed_layers(error)


def _call_number(
    options: str, lines: Sequence[str], process_set: ProcessSet | None
) -> str:
    """Numbers equal groups of a traced function, which may run at the same time.

    Each process set has its own count, since only its members make its calls. The name
    of the traced function is included because functions that it calls may run in
    parallel with it. Eager calls run one after another and need no number. A retrace
    starts again at 0, so it reuses the groups of the first trace.
    """
    graph = tf.compat.v1.get_default_graph()
    where = place_of(graph)
    key = "\n".join([*lines, options, where, str(id_of(process_set))])
    calls = graph.get_collection_ref(_CALLS)
    number = calls.count(key)
    calls.append(key)
    return f"call={number} in={where}"
