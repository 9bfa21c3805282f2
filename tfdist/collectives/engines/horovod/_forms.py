"""Pure functions that convert tensors to and from the forms that Horovod needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def make_unfoldable(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, wrapped so that TensorFlow folds no operation on them.

    Horovod declares its operations as stateless. With a constant input, an operation
    would run during graph optimization, only on the rank whose input is constant, and
    never again. So each input passes through a stateful operation that does not copy
    it. (With TensorFlow 2.15, neither a PlaceholderWithDefault nor a Reshape to a
    variable shape helps.)
    """
    if tf.executing_eagerly():
        return list(tensors)
    return [tf.raw_ops.DebugIdentityV2(input=one, debug_urls=[]) for one in tensors]


def rows_of(value: Any) -> tf.Tensor:
    """Returns a tensor with a first dimension: a scalar becomes one row."""
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank == 0:
        return tf.reshape(tensor, [1])
    if tensor.shape.rank is not None:
        return tensor
    shape = tf.shape(tensor)
    first = tf.reshape(tf.reduce_prod(shape[:1]), [1])
    return tf.reshape(tensor, tf.concat([first, shape[1:]], axis=0))


def is_default(splits: tf.Tensor) -> bool:
    return splits.shape.num_elements() == 0


def even_splits(rows: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns splits as even as possible, int32; the first ranks get the extra rows."""
    return rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)


def check_equal_parts(rows: tf.Tensor, size: tf.Tensor) -> Any:
    check = tf.debugging.assert_equal(
        rows % size,
        0,
        "Expected a number of rows that is a multiple of the number of ranks, because "
        "no splits are given.",
    )
    return check if check is not None else tf.no_op()


def times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def divide(total: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    if total.dtype.is_integer:
        return tf.truncatediv(total, tf.cast(size, total.dtype))
    return total / tf.cast(size, total.dtype)
