"""Calls of traced functions that reduce run in the order of the program.

TensorFlow runs two calls at the same time where both only read variables. The
operations in them may have equal names, above all where it is one function that is
called twice; which one a rank starts first is then chance, and the ranks would pair
operations of different calls. So such calls are chained as TensorFlow chains those of
functions with collectives of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_logger = logging.getLogger("tfdist")

_SCOPES_OF = "collective_manager_ids_from_op"
_CALL = "StatefulPartitionedCall"
_PREFIX = "Tfdist"  # of the types of our operations
_SCOPE = 0x7FD157  # number of ours among TensorFlow's scopes of collectives


def chain_calls(module: Any) -> None:
    """Makes TensorFlow chain the calls of functions with operations of ours.

    Args:
        module: `tensorflow.python.framework.auto_control_deps`. The function in it
            that says which calls are chained is private; without it none are.
    """
    scopes_of: Callable[[Any], list[int]] | None = getattr(module, _SCOPES_OF, None)
    if scopes_of is None:
        _logger.warning(
            "TensorFlow %s has no auto_control_deps.%s: do not call two functions "
            "that reduce, or one twice, from one tf.function.",
            tf.__version__,
            _SCOPES_OF,
        )
        return

    def with_ours(op: Any) -> list[int]:
        scopes = list(scopes_of(op))
        if op.type == _CALL and _SCOPE not in scopes and _holds_ours(op):
            scopes.append(_SCOPE)
        return scopes

    setattr(module, _SCOPES_OF, with_ours)


def _holds_ours(call: Any) -> bool:
    """Whether a called function, or one that it calls, has an operation of ours."""
    waiting = [call.get_attr("f").name]
    seen = set(waiting)
    while waiting:
        definition = _definition(call.graph, waiting.pop())
        for node in () if definition is None else definition.node_def:
            if node.op.startswith(_PREFIX):
                return True
            found = set(_functions_of(node)) - seen
            seen |= found
            waiting.extend(found)
    return False


def _functions_of(node: Any) -> Iterator[str]:
    """The names of the functions that a node calls: bodies, branches."""
    for value in node.attr.values():
        for function in (value.func, *value.list.func):
            if function.name:
                yield function.name


def _definition(graph: Any, name: str) -> Any:
    """The FunctionDef of that name; None for what TensorFlow makes by itself."""
    function = graph._get_function(name)
    if function is None:
        return None
    known = getattr(function, "cached_definition", None)
    return function.definition if known is None else known
