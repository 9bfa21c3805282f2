"""The collectives of `horovod.keras`: of numbers and arrays, as tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.horovod import tensorflow as hvd


def allreduce(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: Any,
    compression: Any,
) -> tf.Tensor:
    """The reduction of all ranks' values."""
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None) -> tf.Tensor:
    """The values of all ranks, one after the other."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None) -> tf.Tensor:
    """The value of one rank."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None, op: Any) -> tf.Tensor:
    """This rank's rows of the reduction."""
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
