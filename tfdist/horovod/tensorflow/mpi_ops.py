"""Collective operations on tensors, and Horovod's basic functions.

All operations except `join` work eagerly, in a `tf.function`, and in a `tf.Graph` for a
`tf.compat.v1.Session`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.horovod.common.basics import basics as _basics  # noqa: F401 - for scripts
from tfdist.horovod.common.process_sets import global_process_set, own
from tfdist.horovod.common.reduce_ops import handle_average_backwards_compatibility
from tfdist.horovod.common.util import gpu_available, num_rank_is_power_2
from tfdist.horovod.tensorflow import _shared
from tfdist.horovod.tensorflow._arguments import invalid, scale_gradient, scoped
from tfdist.horovod.tensorflow._shared import *  # noqa: F403
from tfdist.horovod.tensorflow.place_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)

__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += _shared.__all__

check_num_rank_power_of_2 = num_rank_is_power_2


@tf.autograph.experimental.do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in rank order, on every rank.

    Args:
        tensor: tensor, NumPy array or variable of shape `[n, ...]`; `n` may differ
            between the ranks and may be 0.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        Tensor of shape `[sum of n, ...]`. As in Horovod, the gradient of `tensor` is
        the mean over the ranks of the gradients of this rank's rows;
        `tfdist.allgather` uses the sum.

    Raises:
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first, differ
            between the ranks; raised on every rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather(tf.constant([[1, 2]])).numpy().tolist()
        [[1, 2]]
    """
    return _allgather(tensor, scoped(name, ignore_name_scope), own(process_set))


def _allgather(
    tensor: Any, name: str | None, members: tfdist.ProcessSet | None
) -> tf.Tensor:
    return tfdist.allgather(
        _with_mean_gradient(tensor, members), name=name, process_set=members
    )


def _with_mean_gradient(tensor: Any, members: tfdist.ProcessSet | None) -> tf.Tensor:
    """Returns the tensor; its gradient in allgather and broadcast becomes a mean.

    tfdist sums the ranks' gradients. Horovod averages them: `_allgather_grad` and
    `_broadcast_grad` of horovod/tensorflow/mpi_ops.py reduce with `op=Average`.
    """
    return scale_gradient(tensor, members, lambda size: 1.0 / size)


@tf.autograph.experimental.do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Calls `allgather` for every tensor of a list.

    Args:
        tensors: as in `allgather`; the same number on every rank.
        name: operation name, as in `allgather`.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        The gathered tensors, in the order of `tensors`; gradients as in `allgather`.

    Raises:
        tf.errors.FailedPreconditionError: as in `allgather`.
    """
    base = scoped(name, ignore_name_scope)
    members = own(process_set)
    return [
        _allgather(tensor, f"{base}.{number}" if base else None, members)
        for number, tensor in enumerate(tensors)
    ]


@tf.autograph.experimental.do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Broadcasts the value of `tensor` on rank `root_rank` to every rank.

    Args:
        tensor: tensor, NumPy array or variable, of the same shape on every rank.
        root_rank: rank (of the job) whose value is sent.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        Tensor like `tensor`. As in Horovod, the root's gradient is the mean of all
        ranks' gradients (`tfdist.broadcast` uses their sum); on other ranks it is 0.

    Raises:
        tf.errors.FailedPreconditionError: shapes, dtypes or roots differ between the
            ranks; raised on every rank.
        tf.errors.InvalidArgumentError: `root_rank` does not exist.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.broadcast(tf.constant(7), root_rank=0))
        7
    """
    members = own(process_set)
    return tfdist.broadcast(
        _with_mean_gradient(tensor, members),
        root_rank,
        name=scoped(name, ignore_name_scope),
        process_set=members,
    )


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Sets variables to their values on rank `root_rank`.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every rank.
        root_rank: rank (of the job) whose values are sent.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        The values, in the order of `variables`; in a graph, the values after the
        assignment.

    Raises:
        tf.errors.FailedPreconditionError: shapes, dtypes or roots differ between the
            ranks; raised on every rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_([tf.Variable(3.0)], root_rank=0)[0].numpy().item()
        3.0
    """
    from tfdist.collectives import grouped_broadcast

    listed = list(variables)
    values = grouped_broadcast(
        [tf.convert_to_tensor(v) for v in listed],
        root_rank,
        name=name,
        process_set=own(process_set),
    )
    assigned = [v.assign(value) for v, value in zip(listed, values, strict=True)]
    if tf.executing_eagerly():
        return values
    with tf.control_dependencies([one for one in assigned if one is not None]):
        return [tf.identity(value) for value in values]


@tf.autograph.experimental.do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Sends part of this rank's rows to each rank, and receives rows from each rank.

    Args:
        tensor: tensor, NumPy array or variable of shape `[rows, ...]`.
        splits: number of consecutive rows that are sent to each rank: integers >= 0
            whose sum is `rows`. Default: equal parts.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        The received rows, concatenated in rank order. If `splits` is given, a tuple of
        these rows and the number of rows received from each rank (int32 of shape
        `[size]`).

    Raises:
        tf.errors.InvalidArgumentError: `splits` does not match the tensor; or `splits`
            is not given and the rows cannot be divided evenly.
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first, differ
            between the ranks; raised on every rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> rows, received = hvd.alltoall(tf.constant([1, 2, 3]), splits=[3])
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([1, 2, 3], [3])
    """
    value = tf.convert_to_tensor(tensor)
    try:
        rows, received = tfdist.alltoall(
            value,
            splits,
            name=scoped(name, ignore_name_scope),
            process_set=own(process_set),
        )
    except ValueError as error:
        raise invalid(str(error)) from None
    return rows if splits is None else (rows, tf.cast(received, tf.int32))


def join() -> tf.Tensor:
    """Signals that this rank has no more data; returns when every rank has joined.

    Until then, this rank takes part in the operations of the other ranks. It
    contributes the identity to a reduction (0 to a sum), and no rows to an allgather or
    alltoall. An average is over the ranks that call the operation.

    Returns:
        int32 scalar, the same on all ranks: the lowest rank that has called every
        operation itself. Use it as the root of `hvd.broadcast_variables`.

    Raises:
        tf.errors.FailedPreconditionError: a rank that has joined is the root of a
            broadcast; raised on every rank.
        RuntimeError: called in a graph.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.join())
        0
    """
    return tf.constant(tfdist.join(), tf.int32)
