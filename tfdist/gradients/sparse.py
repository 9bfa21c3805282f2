"""Gradients of tables: the rows that a batch has used, and not the whole table.

The ranks gather each other's rows (allgather) and each adds up those with equal
indices, in the order of the ranks. The result has every index once: Keras's optimizers
use each row of a `tf.IndexedSlices` by itself, so that with duplicates Adam, Adagrad
and clipping would be wrong.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import ReduceOp
from tfdist.gradients.options import ReduceOptions

# A table of at least so many bytes is reduced by rows unless the user says otherwise:
# below it, one message of a bucket is cheaper than two gathers.
TABLE_BYTES = 8 << 20


def by_rows(shape: Any, itemsize: int, sparse_as_dense: bool | None) -> bool:
    """Whether a gradient of this table may be reduced by rows.

    The same on every rank: a function of the variable and the options alone.

    Args:
        shape: of the variable, known.
        itemsize: bytes of one element.
        sparse_as_dense: what the user wants; None: rows from `TABLE_BYTES` on.

    Example:
        >>> from tfdist.gradients.sparse import by_rows
        >>> by_rows((1000, 16), 4, None), by_rows((1000, 16), 4, False)
        (False, True)
    """
    if not len(shape) or sparse_as_dense:
        return False
    return sparse_as_dense is False or math.prod(shape) * itemsize >= TABLE_BYTES


def rows_of(grad: Any, variable: Any) -> tf.IndexedSlices:
    """The gradient as rows: a dense one has them all, None has none.

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
    """Every index once, in the order of its first appearance.

    Half types are added in float32.

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
    """The rows of all ranks, every index once.

    Args:
        slices: this rank's rows (`rows_of`).
        options: average or sum, the ranks, the type that is sent.
        name: pairs the calls of the ranks; of its own for every gradient of a step.

    Returns:
        The same on every rank, in the type of `slices`.
    """
    own = sum_duplicates(slices)
    dtype = slices.values.dtype
    codec = options.codec()
    sent = codec.encode(own.values)
    process_set = options.process_set
    values = collectives.allgather(sent, name=f"{name}.values", process_set=process_set)
    # Each rank that calls this sends a mark too: an average divides by their number,
    # which is less than the size when ranks have joined. It is not -1, which a lookup
    # on a GPU answers with zeros: an index out of range goes its way like every other.
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
