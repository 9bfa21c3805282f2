"""DistributedOptimizer for Keras and TensorFlow 1 optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.horovod._warnings import warn_unused_device
from tfdist.horovod.common.process_sets import global_process_set
from tfdist.horovod.common.reduce_ops import Average
from tfdist.horovod.tensorflow._arguments import reduce_op
from tfdist.horovod.tensorflow._groups import groups_of
from tfdist.horovod.tensorflow.compression import Compression
from tfdist.horovod.tensorflow.gradients import GradientOptions
from tfdist.horovod.tensorflow.legacy_optimizer import LegacyDistributedOptimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer that reduces gradients over all ranks and then applies them.

    Args:
        optimizer: a `tf.compat.v1.train.Optimizer` or a Keras 3 optimizer. For a Keras
            optimizer, this function calls
            `horovod.tensorflow.keras.DistributedOptimizer`, which describes the
            options.
        name: name of a TensorFlow 1 optimizer; for a Keras optimizer, distinguishes it
            from optimizers with an equal list of variables.
        use_locking: for TensorFlow 1 optimizers; must be False for Keras optimizers.
        device_dense: ignored, with a warning.
        device_sparse: ignored, with a warning.
        compression: `Compression.none` (default), `Compression.fp16` or "bf16"; for a
            TensorFlow 1 optimizer, also a custom class, with which all gradients are
            reduced as dense tensors.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors. Keras
            optimizers reduce those of small tables as dense tensors in any case.
        backward_passes_per_step: number of backward passes whose gradients are added up
            before they are reduced and applied. With TensorFlow 1 optimizers, values
            above 1 work only in graphs, `global_step` counts backward passes, and the
            program has to run `tf.compat.v1.local_variables_initializer()`, as in
            Horovod.
        op: `Average` (default), `Sum`, or `Adasum` for Keras optimizers.
        gradient_predivide_factor: factor by which gradients are divided before the
            reduction and multiplied afterwards; only with `Average`.
        average_aggregated_gradients: whether the sum of gradients is divided by
            `backward_passes_per_step`.
        num_groups: deprecated; use `groups`.
        groups: number of operations that reduce the gradients, or a list with a list of
            variables for each operation.
        process_set: the ranks over which gradients are reduced. All other ranks use
            their own gradients.
        scale_local_gradients: whether, with `Average`, gradients of local variables
            (`register_local_var`) are divided by the number of ranks.

    Returns:
        The optimizer.

    Raises:
        ValueError: `optimizer` is not a supported optimizer, or options contradict each
            other.
        NotImplementedError: Adasum is requested for a TensorFlow 1 optimizer.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        >>> w = tf.Variable(3.0)
        >>> _ = hvd.DistributedOptimizer(sgd).minimize(lambda: w * w, var_list=[w])
        >>> float(w)
        0.0
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        warn_unused_device("device_dense", device_dense)
        warn_unused_device("device_sparse", device_sparse)
        options = GradientOptions(
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups_of(groups, num_groups),
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
        if reduce_op(op) is ReduceOp.ADASUM:
            raise NotImplementedError(
                "op=hvd.Adasum is supported for Keras optimizers, not for those of "
                "TensorFlow 1. Use a Keras optimizer, or hvd.DistributedGradientTape "
                "with op=hvd.Adasum."
            )
        return LegacyDistributedOptimizer(
            optimizer,
            options,
            name=name,
            use_locking=use_locking,
            passes=backward_passes_per_step,
            average_passes=average_aggregated_gradients,
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "Expected a Keras 3 optimizer or a tf.compat.v1.train.Optimizer, got "
            f"{type(optimizer).__name__}: {optimizer!r}."
        )
    if use_locking:
        raise ValueError(
            "use_locking=True is for TensorFlow 1 optimizers; Keras optimizers have no "
            "such option. Omit it."
        )
    from tfdist.horovod._keras.optimizer import DistributedOptimizer as of_keras

    return of_keras(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
