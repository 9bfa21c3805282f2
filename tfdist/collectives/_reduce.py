"""reduce and reduce_scatter: the result on one rank, or one part of it on each rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.reduce_op import ReduceOp, check_adasum
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def reduce(
    tensor: Any,
    root: int = 0,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Reduces `tensor` over all ranks; rank `root` gets the result.

    Args:
        tensor: as in `allreduce`, of any shape `S`, which must be equal on all ranks.
        root: rank that gets the result; must be equal on all ranks. Default: 0.
        op: the reduction, as in `allreduce`, without ADASUM; default
            `ReduceOp.AVERAGE`.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        prescale: factor applied before the reduction; default 1. Must be 1 for integers
            and bool.
        postscale: factor applied after the reduction; default 1. Must be 1 for integers
            and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor of shape `S`: the reduction on `root`, and the unchanged `tensor` on
        other ranks. Differentiable for `SUM` and `AVERAGE`: the gradient of the root's
        result is broadcast to all ranks, with the same factors. Ranks other than `root`
        add the gradient of their unchanged tensor.

    Raises:
        TypeError: `op` does not support the dtype; the message suggests a fix.
        tfdist.MismatchError: shapes, dtypes, roots or options differ between the
            ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0])
        >>> tfdist.reduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0]

        On two ranks, `[1, 2]` on rank 0 and `[1, 0]` on rank 1 give `[2, 2]` on rank 0,
        while rank 1 keeps `[1, 0]`.
    """
    check_adasum(op, "reduce", process_set)
    value = _arguments.reducible(tensor, op, "reduce")
    return emit.reduce(
        [value],
        root,
        operation_name("reduce", name, process_set=id_of(process_set)),
        op,
        *_arguments.scales_of(prescale, postscale, value.dtype),
        timeout_s,
        process_set=id_of(process_set),
    )[0]


@tf.autograph.experimental.do_not_convert
def reduce_scatter(
    tensor: Any,
    splits: Any = None,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Reduces `tensor` over all ranks; each rank gets one part of the rows.

    This moves half as much data as an `allreduce`. An `allgather` of the parts gives
    the result of the `allreduce`.

    Args:
        tensor: as in `allreduce`, of shape `[rows, ...]`, which must be equal on all
            ranks. A scalar is treated as one row.
        splits: numbers of consecutive rows that each rank gets: a list of integers
            >= 0, one for each rank, that sum to `rows`. Must be equal on all ranks.
            Default: as even as possible; each of the first `rows % size` ranks gets one
            more row.
        op: the reduction, as in `allreduce`, without ADASUM; default
            `ReduceOp.AVERAGE`.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        prescale: factor applied before the reduction; default 1. Must be 1 for integers
            and bool.
        postscale: factor applied after the reduction; default 1. Must be 1 for integers
            and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor of shape `[splits[rank], ...]`. Differentiable for `SUM` and `AVERAGE`:
        the gradient is an `allgather` of the gradients of the parts, multiplied by the
        factors.

    Raises:
        TypeError: `op` does not support the dtype; the message suggests a fix.
        tfdist.MismatchError: shapes, dtypes, `splits` or options differ between the
            ranks.
        tf.errors.InvalidArgumentError: `splits` does not match the tensor.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> tfdist.reduce_scatter(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0, 3.0]

        On two ranks, `[1, 2, 3]` on one rank and `[1, 0, 1]` on the other give `[2, 2]`
        on rank 0 and `[4]` on rank 1. With `splits=[1, 2]`, they give `[2]` and `[2,
        4]`.
    """
    check_adasum(op, "reduce_scatter", process_set)
    value = _arguments.reducible(tensor, op, "reduce_scatter")
    return emit.reduce_scatter(
        value,
        _arguments.splits_of(splits, "reduce_scatter"),
        operation_name("reduce_scatter", name, process_set=id_of(process_set)),
        op,
        *_arguments.scales_of(prescale, postscale, value.dtype),
        timeout_s,
        process_set=id_of(process_set),
    )
