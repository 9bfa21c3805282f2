"""`horovod.tensorflow.keras`: its names, over tfdist.

Example:
    >>> import keras
    >>> import tfdist.horovod.tensorflow.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
    >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ...              hvd.callbacks.MetricAverageCallback()]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod._keras import loading, values
from tfdist.horovod._keras.optimizer import distributed_optimizer, partial_optimizer
from tfdist.horovod._keras.options import note_device, reduction, wire_type
from tfdist.horovod.common.process_sets import own
from tfdist.horovod.tensorflow import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
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
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from tfdist.horovod.tensorflow.keras import callbacks, elastic

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


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients over all ranks.

    The optimizer given is changed in place and returned (Horovod returns a copy). It
    keeps its class's name: a saved model names Keras's own, and loads without tfdist.
    What it returns has `register_local_var(var)`: the gradient of that variable is not
    reduced. See `tfdist.DistributedOptimizer`.

    Args:
        optimizer: a Keras optimizer; also a `LossScaleOptimizer` around one.
        name: tells apart optimizers of equal lists of variables; default: their order.
        device_dense: has no meaning here; a warning says so.
        device_sparse: likewise.
        compression: `Compression.none` or `Compression.fp16`; also "bf16".
        sparse_as_dense: True: gradients of embeddings are reduced as dense tensors;
            False: those of tables of 8 MiB and more by the rows in use, smaller ones
            dense, which is faster. The results are equal.
        gradient_predivide_factor: f: gradients are multiplied by 1/f before they are
            added up and by f/size after it; only with `Average`.
        op: `Average` or `Sum`.
        backward_passes_per_step: batches whose gradients are added up before they are
            reduced and applied. `optimizer.iterations` counts batches.
        average_aggregated_gradients: whether their mean is applied, else their sum.
        num_groups: deprecated, `groups`.
        groups: a number of groups of gradients, each reduced in one operation; or a
            list of lists of variables; default: by `TFDIST_BUCKET_BYTES`. The same
            bits come out.
        process_set: the ranks over which gradients are reduced.
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks.

    Returns:
        The optimizer; under the policy `mixed_float16` a `LossScaleOptimizer` around
        it.

    Raises:
        TypeError: `optimizer` is no Keras optimizer.
        ValueError: it is wrapped already, or an option is wrong.
    """
    return distributed_optimizer(
        optimizer,
        name=name,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        **_translated(device_dense, device_sparse, compression, op, process_set),
    )


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """As `DistributedOptimizer`; the weights of some layers stay on their rank.

    Args:
        optimizer: as of `DistributedOptimizer`, like all other options.
        name: likewise.
        device_dense: likewise.
        device_sparse: likewise.
        compression: likewise.
        sparse_as_dense: likewise.
        gradient_predivide_factor: likewise.
        op: likewise.
        backward_passes_per_step: likewise.
        average_aggregated_gradients: likewise.
        num_groups: likewise.
        groups: likewise.
        process_set: likewise.
        local_layers: a layer, or a list of layers, that have their weights: the
            gradients of these are not reduced.
        scale_local_gradients: whether these are divided by the number of ranks.

    Returns:
        The optimizer.

    Raises:
        TypeError: something in `local_layers` is no layer.
        ValueError: a layer has no weights yet; as `DistributedOptimizer`.
    """
    return partial_optimizer(
        optimizer,
        local_layers,
        name=name,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        **_translated(device_dense, device_sparse, compression, op, process_set),
    )


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
        value: of the same shape on all ranks.
        name: identifies the operation across ranks; default: its place in the program.
        average: deprecated: True: `op=Average`, False: `op=Sum`.
        prescale_factor: factor before the sum.
        postscale_factor: factor after it.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        Tensor of the shape and type of `value`.

    Raises:
        tf.errors.FailedPreconditionError: shapes, types or ops differ; on every rank.
    """
    return values.allreduce(
        value, name, average, prescale_factor, postscale_factor, op, compression
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """The values of all ranks, one after the other along the first dimension.

    Args:
        value: number, array or tensor; the first dimension may differ between ranks.
        name: as of `allreduce`.

    Returns:
        Tensor with the rows of all ranks.

    Raises:
        tf.errors.FailedPreconditionError: types or other dimensions differ.
    """
    return values.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """The value of one rank, on all.

    Args:
        value: number, array or tensor, of the same shape on all ranks.
        root_rank: whose value it is.
        name: as of `allreduce`.

    Returns:
        Tensor of the shape and type of `value`.

    Raises:
        tf.errors.FailedPreconditionError: shapes, types or roots differ.
    """
    return values.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Reduces over all ranks, and gives each some of the rows.

    Args:
        value: array or tensor of the same shape on all ranks, not a scalar.
        name: as of `allreduce`.
        op: `Average` or `Sum`.

    Returns:
        This rank's rows; the first ranks have one more where they do not divide.

    Raises:
        tf.errors.FailedPreconditionError: shapes, types or ops differ.
    """
    return values.reducescatter(value, name, op)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a saved model, with an optimizer that reduces its gradients.

    The optimizer goes on with the state that was saved. One rank or all may read the
    file; `BroadcastGlobalVariablesCallback` sends what one has read. (All have to, if
    it is the `.keras` file of a `Sequential`: Keras gives its variables other paths
    than those of a new one, and the ranks compare them.)

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: optimizer classes that are not Keras's.
        custom_objects: names of other classes and functions of the model.
        compression: as of `DistributedOptimizer`.
        legacy_opts: whether the file names an optimizer of
            `tf.keras.optimizers.legacy` (Keras 2).

    Returns:
        The model; without an optimizer, if it was saved without.

    Raises:
        ValueError: no such file, or the optimizer adds up batches: whether their sum
            or mean is applied is not in the file.
    """
    return loading.load_model(
        filepath, custom_optimizers, custom_objects, wire_type(compression), legacy_opts
    )


def _translated(
    device_dense: str, device_sparse: str, compression: Any, op: Any, process_set: Any
) -> dict[str, Any]:
    """The options that are written differently in tfdist."""
    note_device("device_dense", device_dense)
    note_device("device_sparse", device_sparse)
    return {
        "compression": wire_type(compression),
        "op": reduction(op),
        "process_set": own(process_set),
    }
