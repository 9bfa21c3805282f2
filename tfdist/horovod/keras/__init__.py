"""`horovod.keras`: as `horovod.tensorflow.keras`, because there is one Keras now.

Example:
    >>> import keras
    >>> import tfdist.horovod.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod._keras import loading, values
from tfdist.horovod._keras.options import wire_type
from tfdist.horovod.keras import callbacks, elastic
from tfdist.horovod.tensorflow.keras import (
    Adasum,
    Average,
    Compression,
    DistributedOptimizer,
    Max,
    Min,
    PartialDistributedOptimizer,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a number, array or tensor over all ranks.

    Args:
        value: of the same shape on all ranks.
        name: identifies the operation across ranks; default: its place in the program.
        average: whether the mean is returned, else the sum.
        prescale_factor: factor before the sum.
        postscale_factor: factor after it.

    Returns:
        Tensor of the shape and type of `value`.

    Raises:
        tf.errors.FailedPreconditionError: shapes or types differ; on every rank.
    """
    return values.allreduce(
        value,
        name,
        None,
        prescale_factor,
        postscale_factor,
        Average if average else Sum,
        Compression.none,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> keras.Model:
    """Loads a saved model, with an optimizer that reduces its gradients.

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: optimizer classes that are not Keras's.
        custom_objects: names of other classes and functions of the model.
        compression: as of `DistributedOptimizer`.

    Returns:
        The model; without an optimizer, if it was saved without.

    Raises:
        ValueError: no such file, or the optimizer adds up batches: whether their sum
            or mean is applied is not in the file.
    """
    return loading.load_model(
        filepath, custom_optimizers, custom_objects, wire_type(compression), False
    )
