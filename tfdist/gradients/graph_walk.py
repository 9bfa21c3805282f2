"""Inputs of symbolic tensors, traced across the functions that graphs call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_CALLS = ("PartitionedCall", "While", "If", "Case")  # ends of the types that call


def origins(tensor: Any) -> list[Any]:
    """The symbolic tensors that a tensor is computed from directly.

    These are the inputs of its operation, what the functions that it calls return in
    its place, and what a function has captured from the graph around it.

    Args:
        tensor: symbolic.
    """
    operation = tensor.op
    found = list(operation.inputs)
    for graph in _called(operation):
        found += _inside(graph, tensor)
    if operation.type == "Placeholder":
        found += _captured(tensor)
    return found


def key_of(tensor: Any) -> tuple[int, str]:
    """Returns a key that identifies a symbolic tensor while its graph exists."""
    return id(tensor.graph), tensor.name


def around(graph: Any) -> Iterator[Any]:
    """A graph and those that it is traced in."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


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
    for one in around(graph):
        found = one._functions.get(name)
        if found is not None:
            return found
    return None


def _inside(graph: Any, tensor: Any) -> list[Any]:
    """Returns the called function's output behind `tensor`; all outputs for a loop."""
    outputs = list(graph.outputs)
    if tensor.op.type.endswith("While") or len(outputs) != len(tensor.op.outputs):
        return outputs
    return [outputs[tensor.value_index]]
