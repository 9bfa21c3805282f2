"""The gradients of `collectives.tf_ops.adjoints` for operations of another library.

TensorFlow knows a gradient by the type of a registered operation. Those of an engine
have other types, whose gradients may mean something else (Horovod's gradient of an
allgather is divided by the number of ranks). So each call is wrapped, and its gradient
is the one that is registered for our operation of the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

import tfdist.collectives  # noqa: F401  registers the gradients


class Node:
    """Stand-in for the `tf.Operation` that is passed to a registered gradient.

    Args:
        kind: type of our operation, such as "TfdistAllreduce".
        attributes: of it, by name.
        inputs: of it, in order.
        outputs: gives its outputs, all of them, when they are asked for.
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
        """Its outputs."""
        return self._outputs()

    def get_attr(self, name: str) -> Any:
        """Returns one of its attributes."""
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
        kind: type of our operation, such as "TfdistAllreduce".
        attributes: what its gradient asks for, by name.
        inputs: the tensors that gradients flow to.
        forward: emits the operation; returns its outputs that gradients come from.
        outputs: gives all outputs of our operation, from those of `forward`; called
            when the gradient asks for them. Default: those of `forward`.

    Returns:
        What `forward` has returned.
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
            # Outputs that forward does not give have no gradient either.
            missing = [None] * (_OUTPUTS.get(kind, len(found)) - len(found))
            results = registered(node, *grads, *missing)
            listed = results if isinstance(results, list | tuple) else [results]
            return list(listed[: len(values)])

        return found, gradient

    return list(run(*inputs))


# Number of outputs of our operations that have one beside the tensors: the splits.
_OUTPUTS = {
    "TfdistAllgather": 2,
    "TfdistReduceScatter": 2,
    "TfdistGather": 2,
    "TfdistAlltoall": 2,
}
