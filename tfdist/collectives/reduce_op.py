"""`ReduceOp`: how reductions combine values, and which operations a dtype supports."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.core import engines, native
from tfdist.core.process_sets import ProcessSet, members_of


class ReduceOp(enum.IntEnum):
    """Operation with which a reduction combines the values of the ranks.

    ===================================  ==========================================
    dtype                                operations
    ===================================  ==========================================
    int8 to int64, uint8 to uint64       all but ADASUM
    bool                                 MIN, MAX, LOGICAL_*
    float16, bfloat16, float32, float64  SUM, AVERAGE, MIN, MAX, PRODUCT, ADASUM
    complex64, complex128                SUM, AVERAGE, PRODUCT
    float8_e5m2, float8_e4m3fn           none: cast to bfloat16
    ===================================  ==========================================

    - float16 and bfloat16 are accumulated in float32 and rounded once.
    - Integer overflow wraps around, as in NumPy. AVERAGE divides the sum by the number
      of ranks. For integers, it divides the wrapped sum and rounds toward zero. Cast
      small integer types before averaging: the uint8 average of 200 and 200 is 72.
    - MIN and MAX propagate NaN. If zeros have different signs, the result may be either
      zero, but it is the same on all ranks. For bool, MIN is `and` and MAX is `or`, as
      in NumPy. SUM raises an error for bool, because it could mean a count (cast to
      int32 for that) or an `or` (use LOGICAL_OR).
    - LOGICAL_* treat every nonzero number as true, as NumPy's `logical_and` does. The
      result keeps the dtype and is 0 or 1. LOGICAL_XOR is true if the value is true on
      an odd number of ranks. LOGICAL_* are not bitwise operations.
    - ADASUM adds tensors that are orthogonal, and averages tensors that are equal. For
      two ranks, the result is `(1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b`; for
      more, ranks 0 and 1 are combined, as are 2 and 3, then both results, and so on.
      Each tensor of a list is reduced separately. The number of ranks has to be a power
      of two, and only `allreduce`, `grouped_allreduce`, `DistributedGradientTape` and
      `DistributedOptimizer` support it. Source: Maleki et al., Scaling Distributed
      Training with Adaptive Summation, MLSys 2021 (arXiv:2006.02924).
    """

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    LOGICAL_AND = 5
    LOGICAL_OR = 6
    LOGICAL_XOR = 7
    ADASUM = 8


_OPS = frozenset(ReduceOp)


def check_reducible(dtype: tf.DType, op: Any, function: str) -> None:
    """Raises if tensors of `dtype` cannot be reduced with `op`.

    Raises:
        ValueError: `op` is not a `ReduceOp`.
        TypeError: `op` does not support the dtype. The message names a supported
            operation, or a dtype to cast to.
    """
    number = dtype.as_datatype_enum
    refusal = native.reduction_refusal(number, reduce_op_number(op))
    engine = engines.chosen()
    if refusal is None and engine is not None:
        refusal = engine.refusal(number, reduce_op_number(op))
    if refusal is not None:
        raise TypeError(f"tfdist.{function}: {refusal}")


def check_adasum(op: Any, function: str, process_set: ProcessSet | None) -> None:
    """Raises if `op` is ADASUM and this function or number of ranks does not allow it.

    Args:
        op: a `ReduceOp`.
        function: name of the public function that is called.
        process_set: the ranks that take part; None: all.

    Raises:
        ValueError: the function is not an allreduce, or the number of ranks is not a
            power of two.

    Example:
        >>> import tfdist
        >>> from tfdist.collectives.reduce_op import ReduceOp, check_adasum
        >>> tfdist.init()
        >>> check_adasum(ReduceOp.ADASUM, "allreduce", None)
    """
    if op != ReduceOp.ADASUM:
        return
    if function in ("reduce", "reduce_scatter"):
        raise ValueError(
            f"tfdist.{function} does not support op=tfdist.ReduceOp.ADASUM. Use "
            "tfdist.allreduce."
        )
    size = len(members_of(process_set))
    if size & (size - 1):
        raise ValueError(
            "op=tfdist.ReduceOp.ADASUM needs 1, 2, 4, 8, ... ranks (a power of two), "
            f"got {size}. Start the job with that many ranks, pass a process_set "
            "of that size, or use op=tfdist.ReduceOp.AVERAGE."
        )


def reduce_op_number(op: Any) -> int:
    """Returns the number of `op` in the core.

    Raises:
        ValueError: `op` is not a `ReduceOp`.
    """
    # Accept integers only: a string or a bool is a mistake, even if it could be
    # converted.
    if isinstance(op, bool) or not isinstance(op, int | np.integer) or op not in _OPS:
        expected = ", ".join(f"tfdist.ReduceOp.{known.name}" for known in ReduceOp)
        raise ValueError(f"Expected op to be one of {expected}, got {op!r}.")
    return int(op)
