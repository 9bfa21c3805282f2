"""Dtypes and reductions that Horovod supports."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.collectives.reduce_op import ReduceOp

# Registered for allreduce (horovod_allreduce, horovod_grouped_allreduce).
REDUCED = frozenset(
    (
        *(tf.uint8, tf.int8, tf.int32, tf.int64),
        *(tf.float16, tf.float32, tf.float64),
    )
)
# Registered for reducescatter.
SCATTERED = frozenset((tf.int32, tf.int64, tf.float16, tf.float32, tf.float64))
# Registered for allgather, broadcast and alltoall. Other dtypes are sent as bytes.
MOVED = REDUCED | {tf.uint16, tf.int16, tf.bool}

_LOGICAL = {
    ReduceOp.LOGICAL_AND: "Min",
    ReduceOp.LOGICAL_OR: "Max",
    ReduceOp.LOGICAL_XOR: "Sum",
}
_OF_BOOL = {
    ReduceOp.MIN: ReduceOp.LOGICAL_AND,
    ReduceOp.MAX: ReduceOp.LOGICAL_OR,
}
_PLAIN = {
    ReduceOp.SUM: "Sum",
    ReduceOp.AVERAGE: "Sum",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
    ReduceOp.PRODUCT: "Product",
}


@dataclasses.dataclass(frozen=True)
class Way:
    """Recipe for building a reduction from Horovod's reductions.

    Attributes:
        op: Horovod's name of the reduction: "Sum", "Min", "Max" or "Product".
        truth: whether elements are sent as uint8, with 1 for each nonzero element, and
            the result is converted back. For a sum, the result is whether the sum is
            odd.
        divides: whether the result is divided by the number of ranks.
    """

    op: str
    truth: bool = False
    divides: bool = False


def way_of(dtype: tf.DType, op: ReduceOp) -> Way | None:
    """Returns how Horovod reduces `dtype` by `op`, or None if it cannot.

    Example:
        >>> from tfdist.collectives.engines.horovod._types import way_of
        >>> way_of(tf.bool, ReduceOp.LOGICAL_OR)
        Way(op='Max', truth=True, divides=False)
    """
    if dtype == tf.bool:
        op = _OF_BOOL.get(op, op)
    if op in _LOGICAL:
        fits = dtype in REDUCED or dtype == tf.bool
        return Way(_LOGICAL[op], truth=True) if fits else None
    if dtype not in REDUCED or op not in _PLAIN:
        return None
    return Way(_PLAIN[op], divides=op is ReduceOp.AVERAGE)


def refusal(dtype: tf.DType, op: ReduceOp) -> str | None:
    """Returns the reason why Horovod cannot reduce `dtype` by `op`, or None."""
    if way_of(dtype, op) is not None:
        return None
    if op is ReduceOp.ADASUM:
        return (
            "The Horovod engine does not support ADASUM, but the native engine does: "
            "unset TFDIST_ENGINE on all ranks."
        )
    known = ", ".join(sorted(one.name for one in REDUCED))
    return (
        f"Horovod does not reduce {dtype.name} by {op.name}; expected one of {known} "
        "(bool: MIN, MAX and LOGICAL_*). Cast it first, or use the native engine, "
        "which supports it: unset TFDIST_ENGINE on all ranks."
    )
