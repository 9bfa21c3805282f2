"""Operations that return this process's ranks and sizes at run time."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.horovod.common.basics import basics

# Results of process_set_included_op that stand for an error.
_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the rank when the operation runs, as int32; `name` names the op."""
    return _place(0, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks when the operation runs, as int32.

    The size of a process set is determined when the operation is created.

    Args:
        process_set_id: ID of an existing process set; 0: all ranks of the job.
        name: name of the operation.

    Raises:
        ValueError: the process set does not exist.
    """
    if process_set_id == 0:
        return _place(1, name)
    ranks = basics._get_process_set_ids_and_ranks().get(process_set_id)
    if ranks is None:
        raise ValueError(f"There is no process set with the id {process_set_id}.")
    return tf.constant(len(ranks), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the local rank when the operation runs, as int32; `name` names the op."""
    return _place(2, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the local size when the operation runs, as int32; `name` names the op."""
    return _place(3, name)


def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Returns whether this rank is in a process set when the operation runs.

    Args:
        process_set_id: ID of the process set; 0: all ranks.
        name: name of the operation.

    Returns:
        int32 scalar: 1 for a member, 0 otherwise; -1 before `hvd.init()`; -3 if the set
        does not exist.
    """

    def included() -> Any:
        return np.int32(_included(process_set_id))

    answer = tf.numpy_function(included, [], tf.int32, name=name)
    answer.set_shape([])
    return answer


def _included(process_set_id: int) -> int:
    if not tfdist.is_initialized():
        return _NOT_INITIALIZED
    ranks = basics._get_process_set_ids_and_ranks().get(process_set_id)
    return _UNKNOWN_SET if ranks is None else int(tfdist.rank() in ranks)


def _place(index: int, name: str | None) -> tf.Tensor:
    """Returns, at run time, entry `index` of rank, size, local rank, local size, ..."""
    if tf.executing_eagerly():
        basics.size()  # raises ValueError before init
    return tf.gather(ops().tfdist_topology(), index, name=name)
