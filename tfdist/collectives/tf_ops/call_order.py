"""Keeps a thread's calls of traced functions with collectives in program order.

TensorFlow runs two calls concurrently if both only read variables. Operations in these
calls may have equal names, in particular if both call the same function. The order in
which a rank starts the operations is then undefined, and the ranks would match
operations of different calls. So such calls are chained, as TensorFlow chains calls of
functions with its own collectives. The same applies to two `tf.cond`, `tf.switch_case`
or `tf.while_loop` in one function.

Calls from different threads have no such order. The operations in a function belong to
the thread that calls it (`op_names.claim`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.collectives.tf_ops.op_names import Key, claim, key_of

_logger = logging.getLogger("tfdist")

_SCOPES_OF = "collective_manager_ids_from_op"
# Types of the operations that call traced functions.
CALLS = frozenset({"StatefulPartitionedCall", "If", "Case", "While"})
_PREFIX = "Tfdist"  # prefix of the types of tfdist operations
_SCOPE = 0x7FD157  # tfdist's id among TensorFlow's scopes of collectives
_CALL_FUNCTION = "call_flat"
_MAX_FUNCTIONS = 4096  # number of functions whose operations are remembered


def chain_calls(module: Any) -> None:
    """Makes TensorFlow chain the calls of functions with tfdist operations.

    Args:
        module: `tensorflow.python.framework.auto_control_deps`. Its function that
            selects the calls to chain is private. If it is missing, no calls are
            chained.
    """
    scopes_of: Callable[[Any], list[int]] | None = getattr(module, _SCOPES_OF, None)
    if scopes_of is None:
        _logger.warning(
            "TensorFlow %s has no auto_control_deps.%s: do not call two functions "
            "with tfdist operations, or one of them twice, from the same tf.function. "
            "Likewise, do not use two tf.cond or tf.while_loop with such operations.",
            tf.__version__,
            _SCOPES_OF,
        )
        return

    def scopes_with_tfdist(op: Any) -> list[int]:
        scopes = list(scopes_of(op))
        if op.type in CALLS and _SCOPE not in scopes and contains(op, _is_tfdist_op):
            scopes.append(_SCOPE)
        return scopes

    setattr(module, _SCOPES_OF, scopes_with_tfdist)


def claim_when_called(cls: Any) -> None:
    """Makes a function's caller thread claim the names of the tfdist operations in it.

    Args:
        cls: TensorFlow's `AtomicFunction`. The method that calls a function is private.
            If it is missing, only eager calls of different threads are distinguished.
    """
    call: Callable[..., Any] | None = getattr(cls, _CALL_FUNCTION, None)
    if call is None:
        _logger.warning(
            "TensorFlow %s has no AtomicFunction.%s: do not call functions with tfdist "
            "operations from two threads.",
            tf.__version__,
            _CALL_FUNCTION,
        )
        return
    known: dict[bytes, list[Key]] = {}  # by the function's name, which is unique

    def claim_and_call(self: Any, *args: Any) -> Any:
        if tf.executing_eagerly():
            keys = known.get(self.name)
            if keys is None:
                keys = known[self.name] = list(_keys_in(self))
                # Another thread may remove the same names.
                for oldest in list(known)[:-_MAX_FUNCTIONS]:
                    known.pop(oldest, None)
            if keys:
                claim(keys)
        return call(self, *args)

    setattr(cls, _CALL_FUNCTION, claim_and_call)


def _keys_in(function: Any) -> set[Key]:
    """Returns the keys of the tfdist operations in a function and in its callees.

    Args:
        function: an `AtomicFunction`; its children are all functions that it calls.
    """
    keys: set[Key] = set()
    for one in (function, *function.children):
        definition = getattr(one, "cached_definition", None)
        for node in () if definition is None else definition.node_def:
            if node.op.startswith(_PREFIX) and "tensor_name" in node.attr:
                numbers = {
                    name: node.attr[name].i
                    for name in ("process_set", "src", "dst")
                    if name in node.attr
                }
                keys.add(key_of(node.attr["tensor_name"].s.decode(), **numbers))
    return keys


def contains(call: Any, matches: Callable[[Any], bool]) -> bool:
    """Returns whether a node in the called functions or in their callees matches.

    Args:
        call: an operation of one of the types in `CALLS`.
        matches: function that accepts a node (`NodeDef`).
    """
    seen = set(_functions_of(call.node_def))
    waiting = list(seen)
    while waiting:
        definition = _definition(call.graph, waiting.pop())
        for node in () if definition is None else definition.node_def:
            if matches(node):
                return True
            found = set(_functions_of(node)) - seen
            seen |= found
            waiting.extend(found)
    return False


def _is_tfdist_op(node: Any) -> bool:
    return str(node.op).startswith(_PREFIX)


def _functions_of(node: Any) -> Iterator[str]:
    """Yields the names of the functions that a node calls, e.g. loop bodies."""
    for value in node.attr.values():
        for function in (value.func, *value.list.func):
            if function.name:
                yield function.name


def _definition(graph: Any, name: str) -> Any:
    """Returns a function's FunctionDef by name; None for TensorFlow's own functions."""
    function = graph._get_function(name)
    if function is None:
        return None
    known = getattr(function, "cached_definition", None)
    return function.definition if known is None else known
