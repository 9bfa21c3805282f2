"""allreduce: reduces values over all ranks; every rank gets the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.reduce_op import ReduceOp, check_adasum
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import batch_name, operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
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
    """Reduces `tensor` over all ranks; the result is bitwise identical on every rank.

    Args:
        tensor: tensor, NumPy array or variable of any shape `S`. Shape and dtype must
            be equal on all ranks. The dtype is integer, floating-point (16 bits or
            more), complex or bool.
        op: the reduction; default `ReduceOp.AVERAGE`. Integers support all but ADASUM;
            floating-point types SUM, AVERAGE, MIN, MAX, PRODUCT and ADASUM; complex
            types SUM, AVERAGE and PRODUCT; bool LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR,
            MIN and MAX. See `ReduceOp` for overflow, NaN, rounding and ADASUM.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function. Pass
            a name if ranks may trace several calls in different orders, or if several
            threads call operations. Each thread then needs its own names.
        prescale: factor applied before the reduction; default 1. Must be 1 for integers
            and bool.
        postscale: factor applied after the reduction; default 1. Must be 1 for integers
            and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor with the shape `S` and dtype of `tensor`. Differentiable for `SUM` and
        `AVERAGE`: the gradient is reduced in the same way.

    Raises:
        TypeError: `op` does not support the dtype; the message suggests a fix.
        ValueError: `prescale` or `postscale` is not 1 for integers or bool,
            `timeout_s` is not above 0, or the number of ranks is not a power of two
            (ADASUM).
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.ThreadError: another thread uses the same name.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> tfdist.allreduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0, 3.0]

        On two ranks, `[1, 2, 3]` on one rank and `[1, 0, 1]` on the other add up to
        `[2, 2, 4]` on both ranks.
    """
    check_adasum(op, "allreduce", process_set)
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
    """Returns a cached function for a valid eager call with factors of 1, else None."""
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


@tf.autograph.experimental.do_not_convert
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
    """Reduces a list of tensors in a few operations instead of one for each tensor.

    Each operation reduces either a single tensor, or tensors of one dtype with at most
    `TFDIST_FUSION_BYTES` in total. The results are bitwise identical however the list
    is split.

    Args:
        tensors: as in `allreduce`. Number, shapes and dtypes must be equal on all
            ranks.
        op: the reduction, as in `allreduce`; default `ReduceOp.AVERAGE`.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        prescale: factor applied before the reduction; default 1. Must be 1 for integers
            and bool.
        postscale: factor applied after the reduction; default 1. Must be 1 for integers
            and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        TypeError: `op` does not support a dtype; the message suggests a fix.
        ValueError: `prescale` or `postscale` is not 1 for integers or bool,
            `timeout_s` is not above 0, or the number of ranks is not a power of two
            (ADASUM).
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> a, b = tfdist.grouped_allreduce([tf.constant(2.0), tf.constant([3.0])])
        >>> float(a), b.numpy().tolist()
        (2.0, [3.0])
    """
    check_adasum(op, "grouped_allreduce", process_set)
    values = [_arguments.reducible(t, op, "grouped_allreduce") for t in tensors]
    scales = [_arguments.scales_of(prescale, postscale, v.dtype) for v in values]
    base = operation_name("grouped_allreduce", name, process_set=id_of(process_set))
    reduced: list[tf.Tensor | None] = [None] * len(values)
    for number, batch in enumerate(_arguments.batches_of(values)):
        outputs = emit.allreduce(
            [values[i] for i in batch],
            batch_name(base, number),
            op,
            *scales[batch[0]],
            timeout_s,
            tensor_indices=batch,
            process_set=id_of(process_set),
        )
        for index, output in zip(batch, outputs, strict=True):
            reduced[index] = output
    return reduced
