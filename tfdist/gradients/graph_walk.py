"""Finds the inputs of symbolic tensors, including those in called functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Suffixes of the types of operations that call functions.
_CALLS = ("PartitionedCall", "While", "If", "Case")


def origins(tensor: Any) -> list[Any]:
    """Returns the symbolic tensors from which a tensor is computed directly.

    These are the inputs of the tensor's operation, the corresponding outputs of the
    functions that the operation calls, and, for a placeholder that captures a tensor of
    an outer graph, that tensor.

    Args:
        tensor: a symbolic tensor.
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
    """Yields a graph and its outer graphs."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _captured(placeholder: Any) -> list[Any]:
    """Returns the tensor of an outer graph that a placeholder captures, if any."""
    captures = getattr(placeholder.graph, "captures", ())
    return [
        outer
        for outer, inner in captures
        if inner.name == placeholder.name and tf.is_symbolic_tensor(outer)
    ]


def _called(operation: Any) -> Iterator[Any]:
    """Yields the graphs of the functions that an operation calls."""
    if not operation.type.endswith(_CALLS):
        return  # do not read other operations' attributes, which may be large
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
    """Returns the output of a called function that `tensor` is computed from.

    Returns all outputs of the function for a loop, or if the function and the operation
    have different numbers of outputs.

    Args:
        graph: graph of the called function.
        tensor: output of the operation that calls the function.
    """
    outputs = list(graph.outputs)
    if tensor.op.type.endswith("While") or len(outputs) != len(tensor.op.outputs):
        return outputs
    return [outputs[tensor.value_index]]
