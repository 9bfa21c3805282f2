"""send and recv: transfer a tensor between two ranks; other ranks make no call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name


@tf.autograph.experimental.do_not_convert
def send(
    tensor: Any,
    dst: int,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
) -> tf.Tensor:
    """Sends `tensor` to rank `dst`, which calls `recv` with this rank as `src`.

    The n-th `send` to a rank is matched with that rank's n-th `recv` from this rank: in
    eager mode in program order, in a `tf.function` in the order of tracing. In a
    `tf.function`, both ranks must use functions with the same name, or pass `name`. In
    eager mode, `send` returns when the receiver has called `recv`. Two ranks that send
    to each other must therefore take turns, or send in one `tf.function`, where the
    operations do not wait for each other.

    Args:
        tensor: tensor of any numeric dtype (including float8) or bool and any shape.
        dst: rank that receives the tensor; must not be this rank.
        name: operation name, the same as for `recv`. Default: derived from the position
            of the call in the traced function.
        timeout_s: seconds to wait for the receiver; default `TFDIST_TIMEOUT_S`.

    Returns:
        A scalar 0 with the dtype of `tensor`, available when the tensor has been sent.
        Differentiable: the gradient of `tensor` is the one that the receiver's `recv`
        sends back, whatever the incoming gradient is. So add the result to the loss of
        this rank, or differentiate the result alone:

            sent = tfdist.send(hidden, 1)
            gradients = tape.gradient(sent, variables)

    Raises:
        tfdist.MismatchError: the receiver expects a different shape or dtype.
        tf.errors.InvalidArgumentError: there is no rank `dst`, or it is this rank.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the receiver did not call `recv` within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> if tfdist.rank() == 0 and tfdist.size() > 1:
        ...     sent = tfdist.send(tf.constant([1.0, 2.0]), 1)
        >>> if tfdist.rank() == 1:
        ...     print(tfdist.recv([2], tf.float32, 0).numpy())

        On two ranks, rank 1 prints `[1. 2.]`.
    """
    value = _arguments.tensor_of(tensor, "send")
    return emit.send(
        value,
        dst,
        operation_name("sendrecv", name, partner=f"to {dst}"),
        timeout_s,
    )


@tf.autograph.experimental.do_not_convert
def recv(
    shape: Any,
    dtype: Any,
    src: int,
    *,
    after: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
) -> tf.Tensor:
    """Receives a tensor from rank `src`, which calls `send` with this rank as `dst`.

    Args:
        shape: shape of the received tensor, as a list of integers, a `tf.TensorShape`
            or an integer vector.
        dtype: dtype of the received tensor, for example `tf.float32`.
        src: rank that sends the tensor; must not be this rank.
        after: a floating-point tensor or variable with respect to which this rank
            differentiates, such as the first weight of this rank's layers; default
            none. Backpropagation runs the gradient of an operation only if the
            operation lies between the loss and the differentiated variables. `after`
            puts `recv` there: the gradient of the result is sent back to `src`, and
            `recv` contributes only zeros to the gradient of `after`.
        name: operation name, the same as for `send`. Default: derived from the position
            of the call in the traced function.
        timeout_s: seconds to wait for the sender; default `TFDIST_TIMEOUT_S`.

    Returns:
        Tensor of `shape` and `dtype` with the sender's value. Differentiable if `after`
        is given: the gradient is sent back. The sender must then differentiate the
        result of its `send`, and this rank the result of `recv`; if only one rank does
        so, it waits for the other.

    Raises:
        tfdist.MismatchError: the sender's shape or dtype is different.
        tf.errors.InvalidArgumentError: there is no rank `src`, or it is this rank.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the sender did not call `send` within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> if tfdist.rank() == 0 and tfdist.size() > 1:
        ...     sent = tfdist.send(tf.constant([1.0, 2.0]), 1)
        >>> if tfdist.rank() == 1:
        ...     print(tfdist.recv([2], tf.float32, 0).numpy())

        On two ranks, rank 1 prints `[1. 2.]`.
    """
    return emit.recv(
        _arguments.shape_of(shape, "recv"),
        _arguments.dtype_of(dtype, "recv"),
        src,
        operation_name("sendrecv", name, partner=f"from {src}"),
        timeout_s,
        after=() if after is None else (tf.convert_to_tensor(after),),
    )
