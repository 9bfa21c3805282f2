"""Reduces embedding gradients by rows, i.e. only the rows that a batch has used.

An allgather collects the rows of all ranks. Each rank then sums the rows with equal
indices, in rank order. The result has no duplicate indices, because Keras optimizers
apply each row of a `tf.IndexedSlices` separately: duplicates would give wrong results
with Adam, Adagrad and clipping.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import ReduceOp
from tfdist.gradients.options import ReduceOptions

# Tables of at least this many bytes are reduced by rows by default. For smaller tables,
# a dense gradient in a bucket costs less than two gathers.
TABLE_BYTES = 8 << 20


def by_rows(shape: Any, itemsize: int, sparse_as_dense: bool | None) -> bool:
    """Returns whether a gradient of this table may be reduced by rows.

    The result depends only on the variable and the options, so it is equal on every
    rank.

    Args:
        shape: static shape of the variable.
        itemsize: bytes of one element.
        sparse_as_dense: the user's choice; None: only tables of at least `TABLE_BYTES`
            are reduced by rows.

    Example:
        >>> from tfdist.gradients.sparse import by_rows
        >>> by_rows((1000, 16), 4, None), by_rows((1000, 16), 4, False)
        (False, True)
    """
    if not len(shape) or sparse_as_dense:
        return False
    return sparse_as_dense is False or math.prod(shape) * itemsize >= TABLE_BYTES


def rows_of(grad: Any, variable: Any) -> tf.IndexedSlices:
    """Converts a gradient to rows: all rows if it is dense, no rows for `None`.

    Args:
        grad: `tf.IndexedSlices`, tensor of the variable's shape, or `None`.
        variable: the table, of shape `[rows, ...]`.
    """
    dims = tf.TensorShape(variable.shape).as_list()
    shape = tf.constant(dims, tf.int64)
    if grad is None:
        values = tf.zeros((0, *dims[1:]), variable.dtype)
        return tf.IndexedSlices(values, tf.zeros((0,), tf.int64), shape)
    if isinstance(grad, tf.IndexedSlices):
        values = tf.ensure_shape(grad.values, (None, *dims[1:]))
        return tf.IndexedSlices(values, tf.cast(grad.indices, tf.int64), shape)
    return tf.IndexedSlices(grad, tf.range(shape[0]), shape)


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums rows with equal indices; keeps the order of first appearance.

    Float16 and bfloat16 values are added in float32.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.sparse import sum_duplicates
        >>> s = sum_duplicates(tf.IndexedSlices(
        ...     tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 3, 7])))
        >>> s.indices.numpy().tolist(), s.values.numpy().tolist()
        ([7, 3], [[5.0], [2.0]])
    """
    indices, places = tf.unique(slices.indices, out_idx=tf.int64)
    values = slices.values
    if values.dtype in (tf.float16, tf.bfloat16):
        values = tf.cast(values, tf.float32)
    total = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    total = tf.cast(total, slices.values.dtype)
    return tf.IndexedSlices(total, indices, slices.dense_shape)


def reduce_rows(
    slices: tf.IndexedSlices, options: ReduceOptions, name: str
) -> tf.IndexedSlices:
    """Sums or averages the rows of all ranks; the result has no duplicate indices.

    Args:
        slices: this rank's rows (`rows_of`).
        options: options of the reduction: operation, process set and codec.
        name: operation name; calls with the same name on different ranks are matched.
            It has to be unique among the gradients of a step.

    Returns:
        The reduced rows, equal on every rank, in the dtype of `slices`.
    """
    own = sum_duplicates(slices)
    dtype = slices.values.dtype
    codec = options.codec()
    sent = codec.encode(own.values)
    process_set = options.process_set
    values = collectives.allgather(sent, name=f"{name}.values", process_set=process_set)
    # Each rank that calls this function also sends a marker. An average divides by the
    # number of markers, which is less than the number of ranks if some have called
    # `tfdist.join`. The marker is not -1, since -1 may be an index in the data: on a
    # GPU, a lookup of -1 returns zeros.
    mark = tf.constant(own.indices.dtype.min, own.indices.dtype)
    marked = collectives.allgather(
        tf.concat([own.indices, [mark]], axis=0),
        name=f"{name}.indices",
        process_set=process_set,
    )
    is_mark = tf.equal(marked, mark)  # under disable_v2_behavior() == is identity
    indices = tf.boolean_mask(marked, tf.logical_not(is_mark))
    if sent.dtype != dtype or dtype in (tf.float16, tf.bfloat16):
        values = tf.cast(values, tf.float32)
    total = sum_duplicates(tf.IndexedSlices(values, indices, slices.dense_shape))
    values = total.values
    if options.op == ReduceOp.AVERAGE:
        values /= tf.cast(tf.math.count_nonzero(is_mark), values.dtype)
    values = codec.decode(values, dtype)
    return tf.IndexedSlices(values, total.indices, slices.dense_shape)
