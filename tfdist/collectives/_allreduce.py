"""allreduce: every rank gets the reduction of all ranks' values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def allreduce(
    tensor: Any,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Reduces `tensor` over all ranks; every rank gets the same bits.

    Args:
        tensor: tensor, NumPy array or variable of any shape `S`, the same on every
            rank; of an integer, floating-point (16 bits and more), complex or bool
            dtype.
        op: how the values are combined; default `ReduceOp.AVERAGE`. Integers take all
            operations; floating-point types SUM, AVERAGE, MIN, MAX and PRODUCT;
            complex types SUM, AVERAGE and PRODUCT; bool LOGICAL_AND, LOGICAL_OR,
            LOGICAL_XOR, MIN and MAX. See `ReduceOp` for overflow, NaN and rounding.
        name: pairs the calls of the ranks; default the place in the traced function.
            Needed where ranks may trace several calls in different orders, and where
            several threads call operations: each thread needs names of its own.
        prescale: factor before the reduction, default 1; must be 1 for integers and
            bool.
        postscale: factor after it, default 1; must be 1 for integers and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `S` and the dtype of `tensor`. Differentiable for `SUM` and
        `AVERAGE`: the gradient is reduced in the same way.

    Raises:
        TypeError: the dtype does not take the operation; says what to do.
        ValueError: `prescale` or `postscale` is not 1 for integers or bool;
            `timeout_s` is not above 0.
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.ThreadError: another thread uses the name.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> tfdist.allreduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0, 3.0]

        On two ranks, `[1, 2, 3]` on one and `[1, 0, 1]` on the other sum up to
        `[2, 2, 4]` on both.
    """
    if process_set is None:
        cached = _cached_call(tensor, op, name, prescale, postscale, timeout_s)
        if cached is not None:
            return cached(tensor)
    value = _arguments.reducible(tensor, op, "allreduce")
    reduced = emit.allreduce(
        [value],
        operation_name("allreduce", name, process_set=id_of(process_set)),
        op,
        *_arguments.scales_of(prescale, postscale, value.dtype),
        timeout_s,
        process_set=id_of(process_set),
    )
    return reduced[0]


def _cached_call(
    tensor: Any, op: Any, name: Any, prescale: Any, postscale: Any, timeout_s: Any
) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns a cached reduction for a valid eager call without factors, or None."""
    if type(prescale) is not float or type(postscale) is not float:
        return None
    if prescale != 1.0 or postscale != 1.0 or not isinstance(tensor, tf.Tensor):
        return None
    if not tf.executing_eagerly():
        return None
    try:
        return emit.eager_allreduce(tensor.dtype, name, op, timeout_s)
    except (TypeError, ValueError):
        return None


def grouped_allreduce(
    tensors: Sequence[Any],
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Reduces a list of tensors, in few operations instead of one for each.

    Tensors of one dtype go together, up to `TFDIST_FUSION_BYTES` an operation. How
    the list is cut does not change the bits of the results.

    Args:
        tensors: as in `allreduce`; the same number, shapes and dtypes on every rank.
        op: how the values are combined, as in `allreduce`; default
            `ReduceOp.AVERAGE`.
        name: pairs the calls of the ranks; default the place in the traced function.
        prescale: factor before the reduction, default 1; must be 1 for integers and
            bool.
        postscale: factor after it, default 1; must be 1 for integers and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        TypeError: a dtype does not take the operation; says what to do.
        ValueError: `prescale` or `postscale` is not 1 for integers or bool;
            `timeout_s` is not above 0.
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> a, b = tfdist.grouped_allreduce([tf.constant(2.0), tf.constant([3.0])])
        >>> float(a), b.numpy().tolist()
        (2.0, [3.0])
    """
    values = [_arguments.reducible(t, op, "grouped_allreduce") for t in tensors]
    scales = [_arguments.scales_of(prescale, postscale, v.dtype) for v in values]
    base = operation_name("grouped_allreduce", name, process_set=id_of(process_set))
    reduced: list[tf.Tensor | None] = [None] * len(values)
    for number, batch in enumerate(_arguments.batches_of(values)):
        outputs = emit.allreduce(
            [values[i] for i in batch],
            f"{base}.{number}" if number else base,
            op,
            *scales[batch[0]],
            timeout_s,
            tensor_indices=batch,
            process_set=id_of(process_set),
        )
        for index, output in zip(batch, outputs, strict=True):
            reduced[index] = output
    return reduced
