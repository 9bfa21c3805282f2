"""Refuses steps of optimizers whose gradients do not come out of a reduction.

Of a script written for Horovod nothing is known but that its ranks shall train one
model. What would let each train its own, a forgotten wrapper or one that comes too
late, shows where an optimizer takes its step. While a step is traced the gradients are
followed back through the graph until a reduction is found. Eagerly there is no graph:
between two steps of an optimizer the engine must have finished something.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import _core, _runtime
from tfdist._gradients import DIFFERENTIATED
from tfdist._reducing_optimizer import ReducesUpdates
from tfdist.rendezvous.environment import detect

# What can give the gradients of all ranks; rows of tables are gathered.
_REDUCTIONS = frozenset(
    {
        "TfdistAllreduce",
        "TfdistReduceGroup",
        "TfdistReduceScatter",
        "TfdistReduce",
        "TfdistAllgather",
    }
)
_CALLS = ("PartitionedCall", "While", "If", "Case")  # ends of the types that call
_MOMENTS = "batch_norm."  # a synchronized layer reduces them, and no gradients
_MARK = "_tfdist_guarded"


def guard() -> None:
    """From now on checks every step of Keras's optimizers, and of TensorFlow 1's."""
    _wrap(keras.optimizers.Optimizer, "apply", lambda grads: grads)
    _wrap(
        *(tf.compat.v1.train.Optimizer, "apply_gradients"),
        lambda pairs: [grad for grad, _ in pairs],
    )


def _wrap(
    owner: Any, name: str, gradients_of: Callable[[list[Any]], list[Any]]
) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)
    _, first, *_ = signature.parameters

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ReducesUpdates):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        # A zip() can be looked at once.
        given.arguments[first] = list(given.arguments[first])
        check_reduced(self, gradients_of(given.arguments[first]))
        return original(*given.args, **given.kwargs)

    setattr(checked, _MARK, True)
    setattr(owner, name, checked)


def check_reduced(optimizer: Any, grads: Iterable[Any]) -> None:
    """Raises if a step of an optimizer that is not wrapped uses this rank's gradients.

    Args:
        optimizer: that takes the step.
        grads: its gradients; None and `tf.IndexedSlices` among them.

    Raises:
        RuntimeError: none of them comes out of a reduction, in a job of several ranks.
    """
    tensors = [getattr(g, "values", g) for g in grads if g is not None]
    if not tensors:
        return
    if not _runtime.is_initialized():
        if detect(os.environ).size > 1:
            raise RuntimeError(_text(optimizer, detect(os.environ).size, early=True))
        return
    if _runtime.size() == 1:
        return
    if any(map(tf.is_symbolic_tensor, tensors)):
        is_reduced = reaches_reduction(tensors)
    else:
        is_reduced = _something_finished(optimizer)
    if not is_reduced:
        raise RuntimeError(_text(optimizer, _runtime.size()))


def _text(optimizer: Any, size: int, *, early: bool = False) -> str:
    name = type(optimizer).__name__
    if early:
        return (
            f"{name} takes a step before hvd.init(): each of the {size} ranks would "
            "train on its own. Call hvd.init() first."
        )
    return (
        f"{name} takes a step with gradients that were not reduced over the {size} "
        "ranks: each would train on its own. Write hvd.DistributedOptimizer("
        f"keras.optimizers.{name}(...)) before model.compile(...), or take the "
        "gradients from hvd.DistributedGradientTape(tape).gradient(...), wrapped "
        "before they are computed. Reduced gradients that come into a tf.function as "
        "arguments, or out of variables, are not recognised: apply them in the "
        "function that reduces them. An optimizer of variables that shall differ "
        "between the ranks: tfdist.DistributedOptimizer(optimizer, "
        "local_variables=lambda variable: True)."
    )


# ---- eagerly ----

_finished_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _something_finished(optimizer: Any) -> bool:
    now = int(_core.counters()["finished"])
    before = _finished_at.get(optimizer, 0)
    _finished_at[optimizer] = now
    return now != before


# ---- in a graph ----


def reaches_reduction(tensors: Iterable[Any]) -> bool:
    """Whether a reduction is among what symbolic tensors are computed from.

    Followed are the inputs of operations, what functions have captured from outside,
    and the functions that operations call.

    Args:
        tensors: of one graph or several.
    """
    seen: set[tuple[int, str]] = set()
    waiting = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op
        key = (id(operation.graph), tensor.name)
        if key in seen:
            continue
        seen.add(key)
        if _is_reduction(operation):
            return True
        waiting += operation.inputs
        for graph in _called(operation):
            waiting += _inside(graph, tensor)
        if operation.type == "Placeholder":
            waiting += _captured(tensor)
    return False


def _is_reduction(operation: Any) -> bool:
    if operation.type not in _REDUCTIONS:
        return False
    if operation.type == "TfdistReduceGroup":
        return True
    if DIFFERENTIATED in operation.node_def.attr:
        return False
    name = operation.get_attr("tensor_name").decode().rpartition("/")[2]
    return not name.startswith(_MOMENTS)


def _captured(placeholder: Any) -> list[Any]:
    """The tensor of an outer graph that a placeholder stands for."""
    captures = getattr(placeholder.graph, "captures", ())
    return [
        outer
        for outer, inner in captures
        if inner.name == placeholder.name and tf.is_symbolic_tensor(outer)
    ]


def _called(operation: Any) -> Iterator[Any]:
    """The graphs of the functions that an operation calls."""
    if not operation.type.endswith(_CALLS):
        return  # attributes of others may be large
    for attribute in operation.node_def.attr.values():
        names = [attribute.func.name, *(f.name for f in attribute.list.func)]
        for name in filter(None, names):
            graph = getattr(_function_of(operation.graph, name), "graph", None)
            if graph is not None:
                yield graph


def _function_of(graph: Any, name: str) -> Any:
    while graph is not None:
        found = graph._functions.get(name)
        if found is not None:
            return found
        graph = getattr(graph, "outer_graph", None)
    return None


def _inside(graph: Any, tensor: Any) -> list[Any]:
    """What a function returns as this result of its call; in a loop, all it returns."""
    outputs = list(graph.outputs)
    if tensor.op.type.endswith("While") or len(outputs) != len(tensor.op.outputs):
        return outputs
    return [outputs[tensor.value_index]]
