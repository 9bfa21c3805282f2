"""Delays the updates of a traced step until tensors are computed.

An operation that fails aborts its step, but operations that do not depend on it may
have run by then. A step has many of these: the step count, weight decay, and the reset
of gradient accumulators do not use the gradients. So operations that use a variable are
ordered after a barrier, as TensorFlow orders them after an operation that writes the
variable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from tfdist.collectives.tf_ops.call_order import CALLS, contains

_MARK = "_tfdist_barrier"  # attribute of the barriers
_REGISTER = "register_acd_resource_resolver"


def hold_updates(tensors: Sequence[Any]) -> None:
    """Delays all later uses of variables in the traced function, and in its callers.

    Has no effect in eager mode, where an error ends the step at once.

    Args:
        tensors: tensors or operations of the current graph, for example the reduced
            gradients. If one of them fails, the later operations do not run.

    Raises:
        NotImplementedError: this version of TensorFlow cannot delay them.
    """
    if tf.executing_eagerly():
        return
    _register()
    with tf.control_dependencies(list(tensors)):
        barrier = tf.no_op(name="updates_wait")
    barrier._set_attr(_MARK, tf.compat.v1.AttrValue(b=True))


@functools.cache
def _register() -> None:
    """Makes TensorFlow treat a barrier as an operation that writes all variables."""
    register = getattr(auto_control_deps, _REGISTER, None)
    if register is None:
        raise NotImplementedError(
            f"TensorFlow {tf.__version__} has no auto_control_deps.{_REGISTER}, which "
            "atomic steps and nan_policy='raise' with gradient accumulation need. "
            "Unset TFDIST_ATOMIC_STEPS, omit nan_policy, or use another version."
        )
    register(_writes_of_barrier)


def _writes_of_barrier(op: Any, reads: Any, writes: Any) -> bool:
    """Adds the variables of the graph to `writes` if `op` is or contains a barrier.

    Returns whether it has added any. TensorFlow repeats the call until it has not.
    """
    del reads
    is_barrier = (op.type == "NoOp" and _is_barrier(op.node_def)) or (
        op.type in CALLS and contains(op, _is_barrier)
    )
    if not is_barrier:
        return False
    found = [
        tensor
        for other in op.graph.get_operations()
        for tensor in other.inputs
        # TensorFlow replaces the output of an Identity with its input.
        if tensor.dtype == tf.resource and tensor.op.type != "Identity"
    ]
    new = [tensor for tensor in found if tensor not in writes]
    writes.update(new)
    return bool(new)


def _is_barrier(node: Any) -> bool:
    return node.op == "NoOp" and _MARK in node.attr
