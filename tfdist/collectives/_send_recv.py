"""send and recv: a tensor from one rank to another; other ranks take no part."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name


def send(
    tensor: Any,
    dst: int,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
) -> tf.Tensor:
    """Hands `tensor` to rank `dst`, which calls `recv` with this rank as `src`.

    The n-th `send` to a rank meets its n-th `recv` from here: in eager mode in the
    order of the program, in a `tf.function` in the order of tracing. There both ranks
    need functions of one name, or `name`. In eager mode `send` returns when the
    receiver has come: two ranks that send to each other do that in one `tf.function`,
    where nothing waits for anything else, or one after the other.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and any shape.
        dst: the rank that receives, another one than this.
        name: pairs the two calls; default the place in the traced function.
        timeout_s: seconds to wait for the receiver; default `TFDIST_TIMEOUT_S`.

    Returns:
        A scalar 0 of the dtype of `tensor`, there when the tensor has been handed
        over. Differentiable: its gradient, whatever comes into it, is what the
        receiver's `recv` gives back, so add it to the loss of this rank, or
        differentiate it alone:

            sent = tfdist.send(hidden, 1)
            gradients = tape.gradient(sent, variables)

    Raises:
        tfdist.MismatchError: the receiver expects another shape or dtype.
        tf.errors.InvalidArgumentError: there is no rank `dst`, or it is this one.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the receiver did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

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


def recv(
    shape: Any,
    dtype: Any,
    src: int,
    *,
    after: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
) -> tf.Tensor:
    """Gets a tensor from rank `src`, which calls `send` with this rank as `dst`.

    Args:
        shape: of the tensor that comes: a list of integers, a `tf.TensorShape` or an
            integer vector.
        dtype: of the tensor that comes, for example `tf.float32`.
        src: the rank that sends, another one than this.
        after: a tensor or variable of a floating-point dtype that this rank
            differentiates by, such as the first weight of its layers; default none.
            Backpropagation calls an operation only where it lies between the loss and
            what the loss is differentiated by. With `after` it lies there: the
            gradient of the result goes back to `src`, `after` gets zeros.
        name: pairs the two calls; default the place in the traced function.
        timeout_s: seconds to wait for the sender; default `TFDIST_TIMEOUT_S`.

    Returns:
        Tensor of `shape` and `dtype`, the sender's value. With `after` differentiable:
        the gradient is sent back. Then the sender must differentiate what its `send`
        returned, and this rank what `recv` returned: one alone waits for the other.

    Raises:
        tfdist.MismatchError: the sender's shape or dtype is another.
        tf.errors.InvalidArgumentError: there is no rank `src`, or it is this one.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the sender did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

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
