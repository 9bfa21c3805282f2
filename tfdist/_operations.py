"""Emits the operations of `libtfdist_tf.so`, and defines their gradients.

Arguments are checked in `tfdist.collectives`; here are tensors of one dtype, a name,
and scales as text (attributes of TensorFlow are float32, a scale must stay exact).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tfdist import _core, _runtime, errors
from tfdist._library import ops
from tfdist._names import operation_name


class ReduceOp(enum.IntEnum):
    """How the values of the ranks are combined.

    ==================================  ==========================================
    dtype                               operations
    ==================================  ==========================================
    int8 to int64, uint8 to uint64      all
    bool                                MIN, MAX, LOGICAL_*
    float16, bfloat16, float32, float64 SUM, AVERAGE, MIN, MAX, PRODUCT
    complex64, complex128               SUM, AVERAGE, PRODUCT
    float8_e5m2, float8_e4m3fn          none: cast to bfloat16
    ==================================  ==========================================

    - float16 and bfloat16 are accumulated in float32 and rounded once.
    - Integers wrap, as NumPy's do. AVERAGE is the sum, divided by the number of ranks:
      of integers the wrapped sum, cut towards zero (cast small types before averaging
      them: the uint8 average of 200 and 200 is 72).
    - MIN and MAX propagate NaN; of zeros of different sign either may come out, the
      same on all ranks. Of bools they are `and` and `or`, as in NumPy. A SUM of bools
      is refused, because it could be a count (cast to int32) or an `or` (LOGICAL_OR).
    - LOGICAL_* take every number but 0 for true, as NumPy's `logical_and` does; the
      result keeps the dtype and is 0 or 1. LOGICAL_XOR is true where an odd number of
      ranks is. They do not combine bits.
    """

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    LOGICAL_AND = 5
    LOGICAL_OR = 6
    LOGICAL_XOR = 7


_OPS = frozenset(ReduceOp)


def allreduce(
    values: list[tf.Tensor],
    name: str,
    op: ReduceOp,
    prescale: str,
    postscale: str,
    timeout_s: float | None,
    *,
    hints: Sequence[int] = (),
    group: str = "",
    bucket: int = 0,
    bucket_count: int = 0,
) -> list[tf.Tensor]:
    """Reduces tensors of one dtype in one operation."""
    return _emit(
        "tfdist_allreduce",
        tensors=values,
        tensor_name=name,
        reduce_op=_reduce_op(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=_timeout(timeout_s),
        group=group,
        bucket=bucket,
        bucket_count=bucket_count,
        hints=list(hints),
    )


def allgather(value: tf.Tensor, name: str, timeout_s: float | None) -> tf.Tensor:
    """Concatenates the rows of all ranks."""
    return _emit(
        "tfdist_allgather",
        tensor=value,
        tensor_name=name,
        timeout_s=_timeout(timeout_s),
    ).rows


def broadcast(
    values: list[tf.Tensor], root: int, name: str, timeout_s: float | None
) -> list[tf.Tensor]:
    """Gives tensors of one dtype the root's values in one operation."""
    _check_root(root, name)
    return _emit(
        "tfdist_broadcast",
        tensors=values,
        tensor_name=name,
        root=int(root),
        timeout_s=_timeout(timeout_s),
    )


def barrier(name: str, timeout_s: float | None) -> None:
    """Waits for all ranks."""
    _emit("tfdist_barrier", tensor_name=name, timeout_s=_timeout(timeout_s))


def check_not_xla() -> None:
    """Raises if the function being traced is compiled by XLA.

    Raises:
        NotImplementedError: names what to change.
    """
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            "tfdist operations cannot run inside a function compiled by XLA in this "
            "release. Write jit_compile=False in model.compile(...) or "
            "tf.function(...). (On a machine with a GPU, Keras compiles by default.)"
        )


def _emit(operation: str, **arguments: Any) -> Any:
    """Runs an operation, or adds it to the graph, with our errors for its own."""
    check_not_xla()
    if tf.executing_eagerly():
        _runtime.check_initialized()  # a fork, too, has no engine
    with errors.translate():
        return getattr(ops(), operation)(**arguments)


def _check_root(root: Any, name: str) -> None:
    if isinstance(root, bool) or not isinstance(root, int | np.integer) or root < 0:
        raise ValueError(f"Expected root to be a rank, an integer >= 0, got {root!r}.")
    # In a graph the operation checks it: a function may be traced before init().
    if not tf.executing_eagerly() or not _runtime.is_initialized():
        return
    if root >= _runtime.size():
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"Expected root to be a rank of 0..{_runtime.size() - 1}, got {root} in "
            f"the broadcast {name}.",
        )


def check_reducible(dtype: tf.DType, op: Any, function: str) -> None:
    """Raises if the core does not reduce tensors of `dtype` by `op`.

    Raises:
        ValueError: `op` is not a `ReduceOp`.
        TypeError: the type does not take the operation; says which does, or what to
            cast to.
    """
    refusal = _core.reduction_refusal(dtype.as_datatype_enum, _reduce_op(op))
    if refusal is not None:
        raise TypeError(f"tfdist.{function}: {refusal}")


def _reduce_op(op: Any) -> int:
    # By value only: a text or a bool that happens to fit is a mistake.
    if isinstance(op, bool) or not isinstance(op, int | np.integer) or op not in _OPS:
        expected = ", ".join(f"tfdist.ReduceOp.{known.name}" for known in ReduceOp)
        raise ValueError(f"Expected op to be one of {expected}, got {op!r}.")
    return int(op)


def _timeout(timeout_s: float | None) -> float:
    """The attribute of the operation; 0 stands for `TFDIST_TIMEOUT_S`."""
    if timeout_s is None:
        return 0.0
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(
            f"Expected timeout_s to be a number of seconds > 0, got {timeout_s!r}."
        )
    return float(timeout_s)


@tf.RegisterGradient("TfdistAllreduce")
def _allreduce_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """Sum and average are linear and the same on all ranks: reduce the gradients so."""
    op = ReduceOp(node.get_attr("reduce_op"))
    name = _text(node, "tensor_name")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(
            f"The gradient of an allreduce with ReduceOp.{op.name} ({name}) is not "
            "defined: expected SUM or AVERAGE. Use tf.stop_gradient on its input."
        )
    return allreduce(
        _dense(node, grads),
        _gradient_name(node),
        op,
        _text(node, "prescale"),
        _text(node, "postscale"),
        node.get_attr("timeout_s") or None,
        hints=node.get_attr("hints"),
    )


@tf.RegisterGradient("TfdistAllgather")
def _allgather_gradient(node: Any, grad: Any, _offset_grad: Any) -> tf.Tensor:
    """The own rows of the sum of all ranks' gradients."""
    rows, offset = node.outputs
    summed = allreduce(
        [tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad)],
        _gradient_name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        node.get_attr("timeout_s") or None,
    )[0]
    shape = tf.shape(node.inputs[0], out_type=tf.int64)
    own_rows = tf.reduce_prod(shape[:1])  # a scalar, of shape [], is one row
    return tf.reshape(summed[offset : offset + own_rows], shape)


@tf.RegisterGradient("TfdistBroadcast")
def _broadcast_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """The sum of all ranks' gradients on the root, zeros elsewhere."""
    summed = allreduce(
        _dense(node, grads),
        _gradient_name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        node.get_attr("timeout_s") or None,
    )
    is_root = tf.equal(ops().tfdist_topology()[0], node.get_attr("root"))
    return [tf.where(is_root, g, tf.zeros_like(g)) for g in summed]


def _dense(node: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, node.outputs, strict=True)
    ]


def _gradient_name(node: Any) -> str:
    return operation_name("gradient", f"{_text(node, 'tensor_name')}.gradient")


def _text(node: Any, attribute: str) -> str:
    value = node.get_attr(attribute)
    return value.decode() if isinstance(value, bytes) else str(value)
