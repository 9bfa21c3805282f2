"""Applies the gradients of `collectives.tf_ops.adjoints` to another library's ops.

TensorFlow finds a gradient by the type of a registered operation. The operations of an
engine have different types, whose gradients may be defined differently: Horovod divides
the gradient of an allgather by the number of ranks. So each call is wrapped, and uses
the gradient registered for the corresponding tfdist operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

import tfdist.collectives  # noqa: F401  registers the gradients


class Node:
    """Stand-in for the `tf.Operation` that a registered gradient expects.

    Args:
        kind: type of the tfdist operation, such as "TfdistAllreduce".
        attributes: attributes of the operation, by name.
        inputs: inputs of the operation, in order.
        outputs: returns all outputs of the operation; called on demand.
    """

    def __init__(
        self,
        kind: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[tf.Tensor],
        outputs: Callable[[], Sequence[tf.Tensor]],
    ) -> None:
        self.type = kind
        self.inputs = list(inputs)
        self._attributes = attributes
        self._outputs = outputs

    @property
    def outputs(self) -> Sequence[tf.Tensor]:
        """Returns the outputs of the operation."""
        return self._outputs()

    def get_attr(self, name: str) -> Any:
        """Returns an attribute by name."""
        return self._attributes[name]


def differentiable(
    kind: str,
    attributes: Mapping[str, Any],
    inputs: Sequence[tf.Tensor],
    forward: Callable[..., Sequence[tf.Tensor]],
    outputs: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
) -> list[tf.Tensor]:
    """Calls `forward(*inputs)`, with the gradient registered for `kind`.

    Args:
        kind: type of the tfdist operation, such as "TfdistAllreduce".
        attributes: attributes that the gradient reads, by name.
        inputs: tensors that gradients flow to.
        forward: emits the operation; returns the outputs that gradients come from.
        outputs: converts the outputs of `forward` to all outputs of the tfdist
            operation; called when the gradient needs them. Default: the outputs of
            `forward`.

    Returns:
        The outputs of `forward`.
    """

    @tf.custom_gradient
    def run(*values: tf.Tensor) -> Any:
        found = list(forward(*values))

        def gradient(*grads: Any) -> list[Any]:
            node = Node(
                kind,
                attributes,
                values,
                lambda: found if outputs is None else outputs(found),
            )
            registered = tf_ops.gradient_registry.lookup(kind)
            # Outputs that `forward` does not return have no gradient either.
            missing = [None] * (_OUTPUTS.get(kind, len(found)) - len(found))
            results = registered(node, *grads, *missing)
            listed = results if isinstance(results, list | tuple) else [results]
            return list(listed[: len(values)])

        return found, gradient

    return list(run(*inputs))


# Number of outputs, for tfdist operations that also return splits.
_OUTPUTS = {
    "TfdistAllgather": 2,
    "TfdistReduceScatter": 2,
    "TfdistGather": 2,
    "TfdistAlltoall": 2,
}
