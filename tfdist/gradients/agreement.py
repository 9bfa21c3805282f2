"""Agreement of the ranks on a list of gradients before they reduce it.

The lists are compared by `collectives.signature`. Which of the gradients are `None` may
differ between ranks.

A gradient that is `None` on all ranks is not reduced, and stays `None`. In a graph
this is fixed when it is traced. Eager calls may have other gradients every time,
on any rank, so there are two kinds of lists of eager calls:

- in the first call all ranks had all gradients: what is `None` later counts as zeros.
- somebody lacked one: every call begins with a small message, from which all ranks
  learn which gradients there are this time; each such choice is a group of its own.
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

# How a group is reduced, in its options: inside XLA, or by an operation per bucket.
BY_XLA = "by=xla"
BY_OPERATIONS = "by=operations"
_PLACE = re.compile(r' call=\d+ in=([^\s"]+)')  # of what was traced, in the options
_CALLS = "tfdist/group_calls"  # graph collection: options of the groups traced there


def agree_on_gradients(
    lines: Sequence[str],
    options: str,
    present: Sequence[bool],
    process_set: ProcessSet | None = None,
) -> tuple[str, list[bool]]:
    """Registers the gradients of a trace or of an eager call.

    Args:
        lines: one line for each variable: path, dtype and shape.
        options: one line: how they are reduced.
        present: for each line whether this rank has a gradient.
        process_set: the ranks that reduce; default all.

    Returns:
        The id of the group to be reduced, and for each line whether any rank has a
        gradient.

    Raises:
        tfdist.MismatchError: the lists or the options differ, or another trace was
            made for gradients that were `None` on all ranks before, but not by all
            ranks; on all ranks.
    """
    if tf.executing_eagerly():
        return _agree_on_call(lines, options, list(present), process_set)
    return _agree_on_trace(lines, options, list(present), process_set)


def agree_on_order(
    order: Sequence[int], list_id: str, process_set: ProcessSet | None = None
) -> list[int] | None:
    """The order in which the gradients of a group go into buckets, of the lowest rank.

    Ranks may see different orders, where one of them lacks a gradient; all need the
    same buckets. What was agreed on stays: a bucket of a group is always the same.

    Args:
        order: what this rank proposes: each index of the gradients once.
        list_id: of `agree_on_gradients`, on all ranks that of the same trace.
        process_set: the ranks that reduce; default all.

    Returns:
        The order, equal on all ranks; None: the lowest rank had joined
        (`tfdist.join`) when the others asked, so there is none.
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
    # One more entry than there are gradients: that a rank lacks one.
    list_id, (*found, gaps) = seen or _register(
        lines, options, [*present, not all(present)], process_set
    )
    if not gaps:
        return list_id, found
    if seen:  # or the ranks have just told each other
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
    """A trace with a gradient that no rank had before needs a new group.

    Where all ranks trace it, they meet there. A rank that does it alone meets buckets
    of the others, which ends on all ranks with an error that shows both lists.
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
    """For each gradient whether a rank has one in this call."""
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
            "Only the ranks with by=xla reduce inside of what XLA compiles: run "
            "make xla on all hosts, or give DistributedOptimizer xla='off' on all "
            "ranks. Or their steps differ in what can run there."
        )
    if late:
        return (
            "This rank has traced a function with a gradient that was None on all "
            "ranks before; all ranks have to trace it at the same step. Or ask for "
            "zeros from the first step on: tape.gradient(..., "
            "unconnected_gradients=tf.UnconnectedGradients.ZERO)."
        )
    places = set(_PLACE.findall(error.message))
    if len(places) > 1:
        return (
            f"The ranks have traced them in {' and in '.join(sorted(places))}: call"
            " the same functions in the same order on all ranks. A function that "
            "one rank calls or traces by itself first (get_concrete_function), all "
            "have to."
        )
    return renamed_layers(error)


def _call_number(
    options: str, lines: Sequence[str], process_set: ProcessSet | None
) -> str:
    """Tells apart equal groups of a traced function, which may run at the same time.

    Other sets count for themselves: not all ranks make their calls. The function that
    is traced is named, as what it calls may run beside it. Eager calls follow each
    other, so they need none. A retrace starts again at 0, so it finds the groups of
    the first trace.
    """
    graph = tf.compat.v1.get_default_graph()
    where = place_of(graph)
    key = "\n".join([*lines, options, where, str(id_of(process_set))])
    calls = graph.get_collection_ref(_CALLS)
    number = calls.count(key)
    calls.append(key)
    return f"call={number} in={where}"
