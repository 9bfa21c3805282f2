"""Agreement of the ranks on a gradient list (a group) before they reduce it.

The ranks compare their lists with `collectives.signature`. The lists have to be equal,
but different gradients may be `None` on different ranks.

A gradient that is `None` on all ranks is not reduced and stays `None`. In a graph, the
ranks determine these gradients once, when it is traced. In eager mode, each call may
have different gradients on each rank, so there are two cases:

- If all ranks had all gradients in the first call, a later `None` is treated as zeros.
- If any rank lacked a gradient in the first call, every call starts with a small
  allreduce, which finds the gradients that any rank has. Each set of gradients found
  in this way forms a separate group.
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

# Part of a group's options: reduced inside XLA, or by one operation per bucket.
BY_XLA = "by=xla"
BY_OPERATIONS = "by=operations"
_PLACE = re.compile(r' call=\d+ in=([^\s"]+)')  # name of the traced function
_CALLS = "tfdist/group_calls"  # graph collection: the groups in this graph


def agree_on_gradients(
    lines: Sequence[str],
    options: str,
    present: Sequence[bool],
    process_set: ProcessSet | None = None,
) -> tuple[str, list[bool]]:
    """Registers the gradient list of a traced function or of an eager call.

    Args:
        lines: one line for each variable: path, dtype and shape.
        options: one line that describes how the gradients are reduced.
        present: for each line, whether this rank has a gradient.
        process_set: the ranks that reduce; default: all ranks.

    Returns:
        The id of the group to be reduced, and for each line, whether any rank has a
        gradient.

    Raises:
        tfdist.MismatchError: on all ranks, if the lists or the options differ, or if
            only some ranks retraced a function with a gradient that was `None` on all
            ranks before.
    """
    if tf.executing_eagerly():
        return _agree_on_call(lines, options, list(present), process_set)
    return _agree_on_trace(lines, options, list(present), process_set)


def agree_on_order(
    order: Sequence[int], list_id: str, process_set: ProcessSet | None = None
) -> list[int] | None:
    """Broadcasts the order in which the lowest rank puts gradients into buckets.

    All ranks need the same buckets, but a rank that lacks a gradient may compute a
    different order. Once the ranks have agreed on the order of a group, it never
    changes.

    Args:
        order: the order that this rank has computed, with each gradient index once.
        list_id: id from `agree_on_gradients`, from the same trace on all ranks.
        process_set: the ranks that reduce; default: all ranks.

    Returns:
        The order, equal on all ranks; None if the lowest rank had already called
        `tfdist.join`.
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
    # The additional last flag tells whether any rank lacks a gradient.
    list_id, (*found, gaps) = seen or _register(
        lines, options, [*present, not all(present)], process_set
    )
    if not gaps:
        return list_id, found
    if seen:  # otherwise the ranks have just exchanged these flags
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
    """Registers the gradient list of a traced function.

    If the function is retraced with a gradient that no rank had before, this creates a
    new group. If only some ranks retrace it, their new group does not match the buckets
    of the remaining ranks. All ranks then raise an error that shows both lists.
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
    """Returns, for each variable, whether any rank has a gradient in this call."""
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
    """Returns advice for the error about gradient lists that differ between ranks."""
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
    """Returns the part of a group's options that numbers equal groups in a function.

    Equal groups of a traced function need different numbers, because they may run at
    the same time. Each process set has a separate count, since only its members make
    its calls. The result includes the name of the traced function, because functions
    that it calls may run in parallel with it. Eager calls run one after another and
    need no number. A retrace starts again at 0, so it reuses the groups of the first
    trace.
    """
    graph = tf.compat.v1.get_default_graph()
    where = place_of(graph)
    key = "\n".join([*lines, options, where, str(id_of(process_set))])
    calls = graph.get_collection_ref(_CALLS)
    number = calls.count(key)
    calls.append(key)
    return f"call={number} in={where}"
