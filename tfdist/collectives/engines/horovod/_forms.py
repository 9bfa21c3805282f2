"""Small forms that tensors take on their way to Horovod and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def held(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same tensors; TensorFlow may neither fold nor merge what is made of them.

    Horovod's operations say of themselves that they are functions of their inputs: one
    of a constant would run when the graph is optimized, on the rank alone whose input
    happens to be one, and never again. So each input passes an operation that is
    stateful and hands it on without a copy. (With TensorFlow 2.15 a
    PlaceholderWithDefault does not help, nor a Reshape to what a variable says.)
    """
    if tf.executing_eagerly():
        return list(tensors)
    return [tf.raw_ops.DebugIdentityV2(input=one, debug_urls=[]) for one in tensors]


def rows_of(value: Any) -> tf.Tensor:
    """A tensor with a first dimension: a scalar is one row."""
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


def even(rows: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """As even as possible; the first ones get one row more. int32."""
    return rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)


def check_equal_parts(rows: tf.Tensor, size: tf.Tensor) -> Any:
    check = tf.debugging.assert_equal(
        rows % size,
        0,
        "Expected a number of rows that is a multiple of the number of ranks, where no "
        "splits are given.",
    )
    return check if check is not None else tf.no_op()


def times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def divided(total: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    if total.dtype.is_integer:
        return tf.truncatediv(total, tf.cast(size, total.dtype))
    return total / tf.cast(size, total.dtype)
