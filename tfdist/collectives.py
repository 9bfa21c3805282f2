"""The collective operations and their gradients.

All of them work eagerly, in a `tf.function` and in a `tf.while_loop`, and without a
launcher at size 1. In a function, operations overlap with computation and with each
other, and ranks may reach them in any order: they are paired by name.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import _core, _operations
from tfdist._names import operation_name
from tfdist._operations import ReduceOp

__all__ = [
    "ReduceOp",
    "allgather",
    "allreduce",
    "allreduce_bucket",
    "barrier",
    "broadcast",
    "grouped_allreduce",
    "grouped_broadcast",
]

# What the operations carry; which of them can be reduced, and how, the core says.
_MOVABLE = frozenset(
    (
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.bool),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn),
    )
)


def allreduce(
    tensor: Any,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
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
            Needed where ranks may trace several calls in different orders.
        prescale: factor before the reduction, default 1; must be 1 for integers and
            bool.
        postscale: factor after it, default 1; must be 1 for integers and bool.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Returns:
        Tensor of shape `S` and the dtype of `tensor`. Differentiable for `SUM` and
        `AVERAGE`: the gradient is reduced in the same way.

    Raises:
        TypeError: the dtype does not take the operation; says what to do.
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> tfdist.init()
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> tfdist.allreduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()
        [1.0, 2.0, 3.0]

        On two ranks, `[1, 2, 3]` on one and `[1, 0, 1]` on the other sum up to
        `[2, 2, 4]` on both.
    """
    value = _tensor(tensor, "allreduce")
    _operations.check_reducible(value.dtype, op, "allreduce")
    reduced = _operations.allreduce(
        [value],
        operation_name("allreduce", name),
        op,
        _scale(prescale, "prescale", value.dtype),
        _scale(postscale, "postscale", value.dtype),
        timeout_s,
    )
    return reduced[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
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

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        TypeError: a dtype does not take the operation; says what to do.
        tfdist.MismatchError: shapes, dtypes or options differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> tfdist.init()
        >>> a, b = tfdist.grouped_allreduce([tf.constant(2.0), tf.constant([3.0])])
        >>> float(a), b.numpy().tolist()
        (2.0, [3.0])
    """
    values = [_tensor(t, "grouped_allreduce") for t in tensors]
    for value in values:
        _operations.check_reducible(value.dtype, op, "grouped_allreduce")
    scales = [
        (_scale(prescale, "prescale", v.dtype), _scale(postscale, "postscale", v.dtype))
        for v in values
    ]
    base = operation_name("grouped_allreduce", name)
    reduced: list[tf.Tensor | None] = [None] * len(values)
    for number, batch in enumerate(_batches(values)):
        outputs = _operations.allreduce(
            [values[i] for i in batch],
            f"{base}.{number}" if number else base,
            op,
            *scales[batch[0]],
            timeout_s,
            hints=batch,
        )
        for index, output in zip(batch, outputs, strict=True):
            reduced[index] = output
    return reduced


def allreduce_bucket(
    tensors: Sequence[tf.Tensor],
    *,
    group_id: str,
    bucket: int,
    bucket_count: int,
    hints: Sequence[int],
    op: ReduceOp,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float | None = None,
) -> list[tf.Tensor]:
    """Reduces one bucket of a group of gradients in one operation; internal.

    Args:
        tensors: the gradients of the bucket, of one dtype.
        group_id: what `_core.register_group` gave for the whole list.
        bucket: index of this bucket, and
        bucket_count: how many the group has.
        hints: for each tensor its index in the whole list.
        op: how the values are combined.
        name: the same on all ranks, and different for each bucket.
        prescale: factor before the reduction.
        postscale: factor after it.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Returns:
        The reduced gradients.
    """
    dtype = tensors[0].dtype
    return _operations.allreduce(
        list(tensors),
        name,
        op,
        _scale(prescale, "prescale", dtype),
        _scale(postscale, "postscale", dtype),
        timeout_s,
        hints=hints,
        group=group_id,
        bucket=bucket,
        bucket_count=bucket_count,
    )


def allgather(
    tensor: Any, *, name: str | None = None, timeout_s: float | None = None
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in rank order, on every rank.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and of shape
            `[n, ...]`; `n` may differ between ranks and may be 0, the rest may not. A
            scalar is one row.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Returns:
        Tensor of shape `[sum of n, ...]`. Differentiable: each rank gets the sum of
        all ranks' gradients of its own rows.

    Raises:
        tfdist.MismatchError: dtypes or the shapes of a row differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> tfdist.init()
        >>> tfdist.allgather(tf.constant([[1, 2]])).numpy().tolist()
        [[1, 2]]
    """
    value = _tensor(tensor, "allgather")
    return _operations.allgather(value, operation_name("allgather", name), timeout_s)


def broadcast(
    tensor: Any,
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
) -> tf.Tensor:
    """Gives every rank the value that `tensor` has on rank `root`.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and any shape `S`, the
            same on every rank; only the value on `root` counts.
        root: the rank whose value is taken, the same on every rank; default 0.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Returns:
        Tensor of shape `S`. Differentiable: the root gets the sum of all ranks'
        gradients, the others zeros.

    Raises:
        tfdist.MismatchError: shapes, dtypes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> tfdist.init()
        >>> int(tfdist.broadcast(tf.constant(7)))
        7
    """
    value = _tensor(tensor, "broadcast")
    return _operations.broadcast(
        [value], root, operation_name("broadcast", name), timeout_s
    )[0]


def grouped_broadcast(
    tensors: Sequence[Any],
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
) -> list[tf.Tensor]:
    """Broadcasts a list of tensors, in few operations instead of one for each.

    Args:
        tensors: as in `broadcast`; the same number, shapes and dtypes on every rank.
        root: the rank whose values are taken; default 0.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Returns:
        The root's values, in the order of `tensors`.

    Raises:
        tfdist.MismatchError: shapes, dtypes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
    """
    values = [_tensor(t, "grouped_broadcast") for t in tensors]
    base = operation_name("grouped_broadcast", name)
    received: list[tf.Tensor | None] = [None] * len(values)
    for number, batch in enumerate(_batches(values)):
        outputs = _operations.broadcast(
            [values[i] for i in batch],
            root,
            f"{base}.{number}" if number else base,
            timeout_s,
        )
        for index, output in zip(batch, outputs, strict=True):
            received[index] = output
    return received


def barrier(*, name: str | None = None, timeout_s: float | None = None) -> None:
    """Waits until every rank has called it.

    In a `tf.function` it keeps its place among the function's effects.

    Args:
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Raises:
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> tfdist.init()
        >>> tfdist.barrier()
    """
    _operations.barrier(operation_name("barrier", name), timeout_s)


def _tensor(value: Any, function: str) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):
        raise TypeError(
            f"Expected a dense tensor in tfdist.{function}, got tf.IndexedSlices. "
            "Make it dense first: tf.convert_to_tensor(value), which sums slices of "
            "the same index."
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(hasattr(item, "shape") for item in value):
            raise
        remedy = "Give it one after the other."
        if function == "allreduce":
            remedy = "Write tfdist.grouped_allreduce(tensors) for a list of tensors."
        raise ValueError(
            f"Expected one tensor in tfdist.{function}, got a {type(value).__name__} "
            f"of {len(value)}, which differ in shape or dtype. {remedy}"
        ) from error
    if tensor.dtype == tf.string:
        raise TypeError(
            f"Expected numbers in tfdist.{function}, got string. Texts and other "
            "Python objects go through tfdist.broadcast_object(value) or "
            "tfdist.allgather_object(value)."
        )
    if tensor.dtype not in _MOVABLE:
        raise TypeError(
            f"Expected a numeric or bool dtype in tfdist.{function}, got "
            f"{tensor.dtype.name}. Cast it first: tf.cast(value, ...)."
        )
    return tensor


def _scale(value: float, what: str, dtype: tf.DType) -> str:
    """A factor as text that gives back the same float64."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"Expected a finite {what}, got {value!r}.")
    if number != 1.0 and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            f"Expected {what}=1 for {dtype.name}, got {value!r}. Cast the tensor to "
            "a floating-point dtype to scale it."
        )
    return repr(number)


def _batches(values: Sequence[tf.Tensor]) -> list[list[int]]:
    """Cuts a list into operations: indices of one dtype, up to the fusion threshold.

    Every rank cuts in the same way, because dtypes and static shapes are the same.
    """
    limit = _fusion_bytes(os.environ.get("TFDIST_FUSION_BYTES"))
    batches: list[list[int]] = []
    open_batches: dict[tf.DType, tuple[list[int], int]] = {}
    for index, value in enumerate(values):
        size = (value.shape.num_elements() or 0) * value.dtype.size
        batch, size_before = open_batches.get(value.dtype, ([], 0))
        if not batch or limit == 0 or size_before + size > limit:
            batch, size_before = [], 0
            batches.append(batch)
        batch.append(index)
        open_batches[value.dtype] = (batch, size_before + size)
    return batches


@functools.lru_cache(maxsize=1)
def _fusion_bytes(_text: str | None) -> int:
    """TFDIST_FUSION_BYTES, parsed again only when its text changes."""
    return int(_core.value("TFDIST_FUSION_BYTES"))
