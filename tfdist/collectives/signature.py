"""Checks that all ranks have the same list of variables or gradients.

A list is described by lines of text (path, dtype, shape) and one line of options. All
lines must be equal on all ranks. The ranks compare a list once per world; later calls
with the same list send no message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.tf_ops.op_names import claim
from tfdist.core import native, runtime
from tfdist.core.deadlock import one_rank_code
from tfdist.core.process_sets import ProcessSet, id_of

_logger = logging.getLogger("tfdist")

_MANY_LISTS = 1000  # more lists are probably a mistake in the program


class _AgreedLists:
    """Lists that the ranks of this world have compared.

    Attributes:
        found: (process set, description) → the id of the list, and for each flag
            whether it is set on any rank.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], tuple[str, list[bool]]] = {}

    def close(self) -> None:
        """Does nothing, because there is nothing to close."""


def agree(
    lines: Sequence[str],
    options: str,
    *,
    process_set: ProcessSet | None = None,
) -> None:
    """Checks that all ranks have the same list of variables and options.

    Blocks until every rank has called it, at most `TFDIST_TIMEOUT_S`. Returns
    immediately for a list that was compared before.

    Args:
        lines: one line for each variable; see `describe_variable`.
        options: one line with the operation on the variables and its options.
        process_set: ranks that make the call; default: all ranks.

    Raises:
        tfdist.MismatchError: on all ranks, if the lists or the options differ.
    """
    register(lines, options, [False] * len(lines), process_set, renamed_layers)


def find_registered(
    lines: Sequence[str], options: str, count: int, process_set: ProcessSet | None
) -> tuple[str, list[bool]] | None:
    """Returns the result of an earlier `register` call for the same list.

    This includes lists that the other ranks registered while this rank had joined.

    Args:
        lines: one line for each variable.
        options: one line with the operation on the variables and its options.
        count: number of flags.
        process_set: ranks that have registered the list; None: all ranks.

    Returns:
        The id of the list and its flags, or None for a new list.
    """
    agreed = _agreed_lists()
    key = _key(lines, options, process_set)
    if key not in agreed:
        found = native.find_gradient_list(key[1], count, process_set=key[0])
        if found is None:
            return None
        agreed[key] = found
    return agreed[key]


def register(
    lines: Sequence[str],
    options: str,
    flags: Sequence[bool],
    process_set: ProcessSet | None,
    hint: Callable[[native.CoreError], str],
) -> tuple[str, list[bool]]:
    """Compares a list across the ranks, once per world, and combines its flags.

    Args:
        lines: one line for each variable.
        options: one line with the operation on the variables and its options.
        flags: flags of this rank, which may differ between ranks.
        process_set: ranks that make the call; None: all ranks.
        hint: returns the advice at the end of the message for a mismatch.

    Returns:
        The id of the list, and for each flag whether it is set on any rank.

    Raises:
        tfdist.MismatchError: on all ranks, if the lists or the options differ.
    """
    agreed = _agreed_lists()
    key = _key(lines, options, process_set)
    if key not in agreed:
        one_rank_code.check_not_alone("The reduction of gradients", key[0])
        claim([(key[0], _list_name(options))])
        try:
            found = native.register_gradient_list(
                key[1], list(flags), process_set=key[0]
            )
        except native.CoreError as error:
            raise _public_error(error, options, hint) from None
        agreed[key] = found
        if len(agreed) == _MANY_LISTS:
            _logger.warning(
                "%d lists of gradients or variables are registered, and all of them "
                "stay in memory. Give a tape or an optimizer the same name in every "
                "step.",
                _MANY_LISTS,
            )
    return agreed[key]


def registered_lists() -> list[tuple[str, list[bool]]]:
    """Returns description and flags of each list that is registered for all ranks."""
    return [
        (description, flags)
        for (process_set, description), (_, flags) in list(_agreed_lists().items())
        if process_set == 0
    ]


def register_again(lists: Sequence[tuple[str, list[bool]]]) -> None:
    """Registers lists of an earlier generation of an elastic job in the current one.

    Graphs that were traced in the earlier generation can then run in this one, because
    the id of a list depends only on its description. All ranks must pass the same
    lists in the same order.

    Args:
        lists: result of `registered_lists`, on one rank of the earlier generation.

    Raises:
        native.CoreError: a rank failed.
    """
    agreed = _agreed_lists()
    agreed.clear()
    for description, flags in lists:
        agreed[0, description] = native.register_gradient_list(
            description, list(flags), process_set=0
        )


def describe_variable(variable: Any, dtype: Any = None) -> str:
    """Returns a line with the path, dtype and shape of a variable, for `agree`."""
    path = " ".join(path_of(variable).split())
    shape = variable.shape  # even the rank of a tf.Variable's shape may be unknown
    is_open = isinstance(shape, tf.TensorShape) and shape.rank is None
    dims = "unknown" if is_open else ",".join(str(dim) for dim in shape)
    return f"{path} {tf.as_dtype(dtype or variable.dtype).name} [{dims}]"


def path_of(variable: Any) -> str:
    """Returns the path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


def _list_name(options: str) -> str:
    """Returns the name that a thread claims for a list; it must differ between threads.

    It ends with the user's name, which the core also finds in `options` (`ListName`).

    Example:
        >>> from tfdist.collectives.signature import _list_name
        >>> _list_name("op=sum name=encoder by=operations")
        'list of gradients or variables encoder'
    """
    name = options.partition(" name=")[2].partition(" ")[0]
    return f"list of gradients or variables {name}".rstrip()


def _agreed_lists() -> dict[tuple[int, str], tuple[str, list[bool]]]:
    return runtime.get_resource("agreed lists", _AgreedLists).found


def _key(
    lines: Sequence[str], options: str, process_set: ProcessSet | None
) -> tuple[int, str]:
    return id_of(process_set), "\n".join([*lines, options])


def renamed_layers(error: native.CoreError) -> str:
    """Returns the advice for variable names that differ."""
    del error
    return (
        "Keras numbers the names of layers: if only the numbers differ, call "
        "keras.utils.clear_session() on all ranks before the model is created."
    )


def _public_error(
    error: native.CoreError, options: str, hint: Callable[[native.CoreError], str]
) -> Exception:
    if error.payload.get("kind") == "mismatch":
        if options.startswith("op=broadcast "):
            error = _about_variables(error)
        message = f"{error.message} ({hint(error)})"
        error = native.CoreError(error.code, message, error.payload)
    public = errors.from_core(error)
    # Otherwise AutoGraph raises an exception class of its own.
    public.ag_pass_through = True  # type: ignore[attr-defined]
    return public


def _about_variables(error: native.CoreError) -> native.CoreError:
    """Rewrites a message of the core, which calls every list a list of gradients."""
    message = error.message.removeprefix('"gradients": ')
    cause = str(error.payload.get("cause", ""))
    payload = {
        **error.payload,
        "tensor": "variables",
        "cause": cause.replace("list of gradients", "list of variables"),
    }
    message = message.replace("list of gradients", "list of variables", 1)
    return native.CoreError(error.code, f'"variables": {message}', payload)
