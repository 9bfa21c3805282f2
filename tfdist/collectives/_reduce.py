"""reduce and reduce_scatter: the reduction of all values, on one rank, or in parts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


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
        tensor: as in `allreduce`: of any shape `S`, the same on every rank.
        root: the rank that gets the result, the same on every rank; default 0.
        op: how the values are combined, as in `allreduce`; default
            `ReduceOp.AVERAGE`.
        name: pairs the calls of the ranks; default the place in the traced function.
        prescale: factor before the reduction, default 1; must be 1 for integers and
            bool.
        postscale: factor after it, default 1; must be 1 for integers and
            bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `S`: on `root` the reduction, on other ranks their own
        `tensor`, unchanged. Differentiable for `SUM` and `AVERAGE`: the gradient of
        the root's result is broadcast to all ranks, with the same factors; on the
        others that of their unchanged tensor is added.

    Raises:
        TypeError: the dtype does not take the operation; says what to do.
        tfdist.MismatchError: shapes, dtypes, roots or options differ between the
            ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0])
        >>> tfdist.reduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0]

        On two ranks, `[1, 2]` on rank 0 and `[1, 0]` on rank 1 give `[2, 2]` on rank
        0, and rank 1 keeps `[1, 0]`.
    """
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
    """Reduces `tensor` over all ranks; each rank gets its part of the rows.

    An `allgather` of the parts makes an `allreduce` of the whole, which moves twice as
    much.

    Args:
        tensor: as in `allreduce`, of shape `[rows, ...]`, the same on every rank; a
            scalar is one row.
        splits: how many consecutive rows each rank gets: as many integers >= 0 as
            there are ranks, which sum to `rows`; the same on every rank. Default: as
            even as possible, the first `rows % size` ranks get one more.
        op: how the values are combined, as in `allreduce`; default
            `ReduceOp.AVERAGE`.
        name: pairs the calls of the ranks; default the place in the traced function.
        prescale: factor before the reduction, default 1; must be 1 for integers and
            bool.
        postscale: factor after it, default 1; must be 1 for integers and
            bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `[splits[rank], ...]`. Differentiable for `SUM` and `AVERAGE`:
        the gradient is an `allgather` of the gradients of the parts, times the
        factors.

    Raises:
        TypeError: the dtype does not take the operation; says what to do.
        tfdist.MismatchError: shapes, dtypes, `splits` or options differ between the
            ranks.
        tf.errors.InvalidArgumentError: `splits` do not fit to the tensor.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> tfdist.reduce_scatter(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0, 3.0]

        On two ranks, `[1, 2, 3]` on one and `[1, 0, 1]` on the other give `[2, 2]` on
        rank 0 and `[4]` on rank 1; with `splits=[1, 2]`, `[2]` and `[2, 4]`.
    """
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
