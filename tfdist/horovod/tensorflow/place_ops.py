"""Who this process is, as operations that answer when they run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.horovod.common.basics import basics

# Answers of process_set_included_op that are no answer.
_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3


def rank_op(name: str | None = None) -> tf.Tensor:
    """The rank when the operation runs, int32; `name` is that of the operation."""
    return _place(0, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks when the operation runs, int32.

    Args:
        process_set_id: of a process set that there is now; 0: of the job.
        name: of the operation.

    Raises:
        ValueError: there is no such process set.
    """
    if process_set_id == 0:
        return _place(1, name)
    ranks = basics._get_process_set_ids_and_ranks().get(process_set_id)
    if ranks is None:
        raise ValueError(f"There is no process set with the id {process_set_id}.")
    return tf.constant(len(ranks), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The local rank when the operation runs, int32; `name` is the operation's."""
    return _place(2, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The local size when the operation runs, int32; `name` is the operation's."""
    return _place(3, name)


def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Whether this rank is in a process set when the operation runs.

    Args:
        process_set_id: of the set; 0: all ranks.
        name: of the operation.

    Returns:
        int32 scalar: 1 or 0; -1 before `hvd.init()`, -3 when there is no such set.
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
    """One of the six numbers of this rank, when the graph runs."""
    if tf.executing_eagerly():
        basics.size()  # ValueError before init
    return tf.gather(ops().tfdist_topology(), index, name=name)
