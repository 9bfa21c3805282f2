"""Validation and conversion of the arguments of the collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.reduce_op import check_reducible
from tfdist.core import runtime

# Dtypes that the operations can send. The core checks which of them can be reduced.
_MOVABLE = frozenset(
    (
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.bool),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn),
    )
)


def tensor_of(value: Any, function: str) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):
        raise TypeError(
            f"Expected a dense tensor in tfdist.{function}, got tf.IndexedSlices. "
            "Make it dense first: tf.convert_to_tensor(value), which sums slices with "
            "the same index."
        )
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        is_ragged = isinstance(value, tf.RaggedTensor)
        remedy = "value.to_tensor()" if is_ragged else "tf.sparse.to_dense(value)"
        raise TypeError(
            f"Expected a dense tensor in tfdist.{function}, got "
            f"tf.{type(value).__name__}. Make it dense first ({remedy}), or send its "
            "component tensors one after the other."
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(hasattr(item, "shape") for item in value):
            raise
        remedy = "Pass them one after the other."
        if function == "allreduce":
            remedy = "Write tfdist.grouped_allreduce(tensors) for a list of tensors."
        raise ValueError(
            f"Expected one tensor in tfdist.{function}, got a {type(value).__name__} "
            f"of {len(value)} tensors, which differ in shape or dtype. {remedy}"
        ) from error
    if tensor.dtype == tf.string:
        raise TypeError(
            f"Expected numbers in tfdist.{function}, got string. Send strings and "
            "other Python objects with tfdist.broadcast_object(value) or "
            "tfdist.allgather_object(value)."
        )
    if tensor.dtype not in _MOVABLE:
        raise TypeError(
            f"Expected a numeric or bool dtype in tfdist.{function}, got "
            f"{tensor.dtype.name}. Cast it first: tf.cast(value, ...)."
        )
    return tensor


def reducible(value: Any, op: Any, function: str) -> tf.Tensor:
    """Returns `value` as a tensor, after checking that `op` can reduce it."""
    tensor = tensor_of(value, function)
    check_reducible(tensor.dtype, op, function)
    return tensor


def splits_of(splits: Any, function: str) -> tf.Tensor:
    """Returns `splits` as an int64 vector; an empty vector stands for the default."""
    if splits is None:
        return tf.zeros([0], tf.int64)
    numbers = _vector_of(splits)
    if numbers is None or numbers.shape.num_elements() == 0:
        raise ValueError(
            f"Expected splits in tfdist.{function} to be a vector of integers, one "
            f"number of rows for each rank, got {splits!r}. Omit splits to use the "
            "default."
        )
    return numbers


def shape_of(shape: Any, function: str) -> tf.Tensor:
    """Returns a shape as an int64 vector."""
    if isinstance(shape, tf.TensorShape) and shape.is_fully_defined():
        shape = shape.as_list()
    dims = _vector_of(shape)
    if dims is None:
        raise ValueError(
            f"Expected shape in tfdist.{function} to be a list of integers or a "
            f"tf.TensorShape without unknown dimensions, got {shape!r}."
        )
    return dims


def dtype_of(dtype: Any, function: str) -> tf.DType:
    """Returns `dtype` as a TensorFlow dtype; raises if it cannot be sent."""
    known = tf.as_dtype(dtype)
    if known not in _MOVABLE:
        raise TypeError(
            f"Expected a numeric or bool dtype in tfdist.{function}, got {known.name}."
        )
    return known


def _vector_of(numbers: Any) -> tf.Tensor | None:
    """Returns an int64 vector, or None if `numbers` does not form one."""
    if tf.is_tensor(numbers) or isinstance(numbers, tf.Variable):
        vector = tf.convert_to_tensor(numbers)
        if not vector.dtype.is_integer:
            return None
        vector = tf.cast(vector, tf.int64)
    else:
        try:
            vector = tf.convert_to_tensor(numbers, tf.int64)
        except (ValueError, TypeError):
            return None
    return vector if vector.shape.rank in (1, None) else None


def scales_of(prescale: float, postscale: float, dtype: tf.DType) -> tuple[str, str]:
    """Returns the factors of a reduction as strings that keep the exact values."""
    return (
        _scale_of(prescale, "prescale", dtype),
        _scale_of(postscale, "postscale", dtype),
    )


def _scale_of(value: float, what: str, dtype: tf.DType) -> str:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"Expected a finite {what}, got {value!r}.")
    if number != 1.0 and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            f"Expected {what}=1 for {dtype.name}, got {value!r}. Cast the tensor to "
            "a floating-point dtype to scale it."
        )
    return repr(number)


def batches_of(values: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns, for each operation, the indices of the tensors that it combines.

    These have one dtype and at most `TFDIST_FUSION_BYTES` in total; a larger tensor has
    its own operation. All ranks split a list in the same way, because their dtypes and
    static shapes are equal.
    """
    limit = int(runtime.setting("TFDIST_FUSION_BYTES"))
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
