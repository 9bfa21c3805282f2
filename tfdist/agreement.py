"""What the ranks agree on about a list of variables before they reduce or send it.

A list is described in lines of text that have to be equal on all ranks; which of the
gradients are `None` may differ. Who knows a list from before does not ask again.

What is `None` on all ranks is not reduced, and stays `None`. In a graph that is fixed
when it is traced. Eager calls may have other gradients every time, on any rank, so
there are two kinds of lists of eager calls:

- in the first call all ranks had all gradients: what is `None` later counts as zeros.
- somebody lacked one: every call begins with a small message, from which all ranks
  learn which gradients there are this time; each such choice is a group of its own.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import _core, _runtime, collectives, errors
from tfdist._names import claim, place_of
from tfdist._process_sets import ProcessSet, id_of, members_of
from tfdist.bucket_order import bits_of, order_from
from tfdist.waits import _one_rank

_logger = logging.getLogger("tfdist")

# What reduces a group, in its options: what XLA compiles, or an operation per bucket.
BY_XLA = "by=xla"
BY_OPERATIONS = "by=operations"
_PLACE = re.compile(r' call=\d+ in=([^\s"]+)')  # of what was traced, in the options
_MANY_LISTS = 1000  # that one program hardly has
_CALLS = "tfdist/group_calls"  # graph collection: options of the groups traced there

# (generation of the world, process set, description) → what the ranks have agreed on:
# the group's id, and which gradients any rank had.
_AGREED: dict[tuple[int, int, str], tuple[str, list[bool]]] = {}


def agree(
    lines: Sequence[str],
    options: str,
    *,
    process_set: ProcessSet | None = None,
) -> None:
    """Makes sure that all ranks have the same list of variables and options.

    Blocks until every rank has asked, at most `TFDIST_TIMEOUT_S`. A list that was
    agreed on before is answered at once.

    Args:
        lines: one line for each variable: path, dtype and shape.
        options: one line: what is done with them.
        process_set: the ranks that ask; default all.

    Raises:
        tfdist.MismatchError: the lists or the options differ; on all ranks.
    """
    _register(lines, options, [False] * len(lines), process_set)


def agree_on_gradients(
    lines: Sequence[str],
    options: str,
    present: Sequence[bool],
    process_set: ProcessSet | None = None,
) -> tuple[str, list[bool]]:
    """As `agree`, for the gradients of a trace or of an eager call.

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
    order: Sequence[int], group_id: str, process_set: ProcessSet | None = None
) -> list[int] | None:
    """The order in which the gradients of a group go into buckets, of the lowest rank.

    Ranks may see different orders, where one of them lacks a gradient; all need the
    same buckets. What was agreed on stays: a bucket of a group is always the same.

    Args:
        order: what this rank proposes: each index of the gradients once.
        group_id: of `agree_on_gradients`, on all ranks that of the same trace.
        process_set: the ranks that reduce; default all.

    Returns:
        The order, equal on all ranks; None: the lowest rank had joined
        (`tfdist.join`) when the others asked, so there is none.
    """
    lines, options = [f"order of group {group_id}"], "plan"
    bits = bits_of(order)
    seen = _seen(lines, options, len(bits), process_set)
    if not seen:
        if members_of(process_set)[0] != _runtime.rank():
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
    seen = _seen(lines, options, len(lines) + 1, process_set)
    # One more entry than there are gradients: that a rank lacks one.
    group_id, (*found, gaps) = seen or _register(
        lines, options, [*present, not all(present)], process_set
    )
    if not gaps:
        return group_id, found
    if seen:  # or the ranks have just told each other
        found = _any_rank(
            present, f"gradients that are not None, list {group_id[:8]}", process_set
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
        seen = _seen(lines, own, len(lines), process_set)
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


def _key(
    lines: Sequence[str], options: str, process_set: ProcessSet | None
) -> tuple[int, int, str]:
    description = "\n".join([*lines, options])
    return _runtime.generation(), id_of(process_set), description


def _seen(
    lines: Sequence[str], options: str, count: int, process_set: ProcessSet | None
) -> tuple[str, list[bool]] | None:
    """What was agreed on before; also by the others, while this rank had joined."""
    key = _key(lines, options, process_set)
    if key not in _AGREED:
        found = _core.find_group(key[2], count, process_set=key[1])
        if found is None:
            return None
        _AGREED[key] = found
    return _AGREED[key]


def _register(
    lines: Sequence[str],
    options: str,
    present: Sequence[bool],
    process_set: ProcessSet | None,
    *,
    late: bool = False,
) -> tuple[str, list[bool]]:
    """The id of the group and its gradients; asks the ranks once in a world."""
    key = _key(lines, options, process_set)
    if key not in _AGREED:
        _one_rank.check_not_alone("The reduction of gradients", key[1])
        claim([(key[1], _list_name(options))])
        try:
            found = _core.register_group(key[2], list(present), process_set=key[1])
        except _core.CoreError as error:
            raise _public_error(error, options, late) from None
        for old in [known for known in _AGREED if known[0] != key[0]]:
            del _AGREED[old]
        _AGREED[key] = found
        if len(_AGREED) == _MANY_LISTS:
            _logger.warning(
                "%d lists of gradients or variables are registered, each of which is "
                "kept. Give a tape or an optimizer the same name in every step.",
                _MANY_LISTS,
            )
    return _AGREED[key]


def _list_name(options: str) -> str:
    """By what lists are told apart that several threads register; the core does so too.

    Example:
        >>> from tfdist.agreement import _list_name
        >>> _list_name("op=sum name=encoder by=operations")
        'list of gradients or variables encoder'
    """
    name = options.partition(" name=")[2].partition(" ")[0]
    return f"list of gradients or variables {name}".rstrip()


def _public_error(error: _core.CoreError, options: str, late: bool) -> Exception:
    if error.payload.get("kind") == "mismatch":
        if options.startswith("op=broadcast "):
            error = _about_variables(error)
        hint = (
            "Keras numbers the names of layers: where only the numbers differ, call "
            "keras.utils.clear_session() on all ranks before the model is made."
        )
        places = set(_PLACE.findall(error.message))
        if len(places) > 1:
            hint = (
                f"The ranks have traced them in {' and in '.join(sorted(places))}: call"
                " the same functions in the same order on all ranks. A function that "
                "one rank calls or traces by itself first (get_concrete_function), all "
                "have to."
            )
        if late:
            hint = (
                "This rank has traced a function with a gradient that was None on all "
                "ranks before; all ranks have to trace it at the same step. Or ask for "
                "zeros from the first step on: tape.gradient(..., "
                "unconnected_gradients=tf.UnconnectedGradients.ZERO)."
            )
        if BY_XLA in error.message and BY_OPERATIONS in error.message:
            hint = (
                "Only the ranks with by=xla reduce inside of what XLA compiles: run "
                "make xla on all hosts, or give DistributedOptimizer xla='off' on all "
                "ranks. Or their steps differ in what can run there."
            )
        message = f"{error.message} ({hint})"
        error = _core.CoreError(error.code, message, error.payload)
    public = errors.from_core(error)
    # Or AutoGraph would put a class of its own in the place of ours.
    public.ag_pass_through = True  # type: ignore[attr-defined]
    return public


def _about_variables(error: _core.CoreError) -> _core.CoreError:
    """The core takes every list for gradients; this one is sent, not reduced."""
    message = error.message.removeprefix('"gradients": ')
    cause = str(error.payload.get("cause", ""))
    payload = {
        **error.payload,
        "tensor": "variables",
        "cause": cause.replace("list of gradients", "list of variables"),
    }
    message = message.replace("list of gradients", "list of variables", 1)
    return _core.CoreError(error.code, f'"variables": {message}', payload)


def describe_variable(variable: Any, dtype: Any = None) -> str:
    """One line for a variable: path, dtype, shape; for `agree`."""
    path = " ".join(path_of(variable).split())
    shape = variable.shape  # of a tf.Variable even its rank may be unknown
    is_open = isinstance(shape, tf.TensorShape) and shape.rank is None
    dims = "unknown" if is_open else ",".join(str(dim) for dim in shape)
    return f"{path} {tf.as_dtype(dtype or variable.dtype).name} [{dims}]"


def path_of(variable: Any) -> str:
    """The path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


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
