"""`horovod.tensorflow.keras`: Horovod's names, implemented with tfdist.

Example:
    >>> import keras
    >>> import tfdist.horovod.tensorflow.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
    >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ...              hvd.callbacks.MetricAverageCallback()]
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.horovod import tensorflow as _of_tensors
from tfdist.horovod._keras.loading import load_model
from tfdist.horovod._keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from tfdist.horovod.tensorflow import (
    Compression,
    _shared,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from tfdist.horovod.tensorflow._shared import *  # noqa: F403
from tfdist.horovod.tensorflow._shared import Average
from tfdist.horovod.tensorflow.keras import callbacks, elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _shared.__all__


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Reduces a number, array or tensor over all ranks.

    Args:
        value: number, array or tensor of the same shape on all ranks.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        average: deprecated; True: `op=Average`, False: `op=Sum`.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after the reduction.
        op: `Average` (default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        Tensor with the shape and dtype of `value`.

    Raises:
        tf.errors.FailedPreconditionError: shapes, dtypes or ops differ between the
            ranks; raised on every rank.
    """
    return _of_tensors.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenates the values of all ranks along the first dimension.

    Args:
        value: number, array or tensor; the first dimension may differ between ranks.
        name: operation name, as in `allreduce`.

    Returns:
        Tensor with the rows of all ranks.

    Raises:
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first,
            differ between the ranks.
    """
    return _of_tensors.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Broadcasts the value of one rank to all ranks.

    Args:
        value: number, array or tensor, of the same shape on all ranks.
        root_rank: rank whose value is sent.
        name: operation name, as in `allreduce`.

    Returns:
        Tensor with the shape and dtype of `value`.

    Raises:
        tf.errors.FailedPreconditionError: shapes, dtypes or roots differ.
    """
    return _of_tensors.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Reduces a tensor over all ranks; each rank receives some of the reduced rows.

    Args:
        value: array or tensor of the same shape on all ranks, not a scalar.
        name: operation name, as in `allreduce`.
        op: `Average` or `Sum`.

    Returns:
        This rank's rows. If the rows cannot be divided evenly, the first ranks have one
        row more.

    Raises:
        tf.errors.FailedPreconditionError: shapes, dtypes or ops differ.
    """
    return _of_tensors.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
