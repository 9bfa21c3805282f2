"""alltoall: every rank sends a part of its rows to each rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of this rank's rows to each rank; receives a part from each rank.

    Args:
        tensor: tensor of any numeric dtype (including float8) or bool, of shape `[rows,
            ...]`. `rows` may differ between ranks and may be 0; the other dimensions
            must be equal on all ranks. A scalar is treated as one row.
        splits: numbers of consecutive rows to send to each rank: a list of integers
            >= 0, one for each rank, that sum to `rows`. May differ between ranks.
            Default: equal parts; `rows` must then be a multiple of the number of ranks.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Two tensors. The first contains the received rows in rank order; its shape is
        `[sum of received splits, ...]`. The second contains the received splits: the
        number of rows received from each rank, as int64 of shape `[size]`.
        Differentiable: the gradient is an `alltoall` with the received splits, which
        sends the gradients of the rows back.

    Raises:
        tfdist.MismatchError: dtypes or row shapes differ between the ranks.
        tf.errors.InvalidArgumentError: the `splits` of a rank do not match its tensor,
            or, without `splits`, its rows cannot be divided into equal parts.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> rows, received = tfdist.alltoall(tf.constant([1, 2, 3]))
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([1, 2, 3], [3])

        On two ranks, with `[1, 2, 3]` and `splits=[1, 2]` on rank 0, and with `[4]`
        and `splits=[1, 0]` on rank 1, rank 0 gets `[1, 4]` and `[1, 1]`, and rank 1
        gets `[2, 3]` and `[2, 0]`.
    """
    value = _arguments.tensor_of(tensor, "alltoall")
    return emit.alltoall(
        value,
        _arguments.splits_of(splits, "alltoall"),
        operation_name("alltoall", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    )
