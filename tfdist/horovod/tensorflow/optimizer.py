"""DistributedOptimizer for the optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod._warnings import warn_unused_device
from tfdist.horovod.common.process_sets import global_process_set
from tfdist.horovod.common.reduce_ops import Average
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
    """An optimizer whose gradients are reduced over all ranks before they are applied.

    Args:
        optimizer: of Keras 3 (then this is
            `horovod.tensorflow.keras.DistributedOptimizer`, with all options), or a
            `tf.compat.v1.train.Optimizer`.
        name: of the optimizer.
        use_locking: of the optimizer of TensorFlow 1; must be False for Keras's.
        device_dense: has no meaning here; a warning says so.
        device_sparse: likewise.
        compression: `Compression.none` (default), `Compression.fp16`, also "bf16";
            around an optimizer of TensorFlow 1 also a class of your own, with which all
            gradients are reduced as dense tensors.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        backward_passes_per_step: how many gradients are added up before they are
            reduced and applied. In TensorFlow 1 for graphs only.
        op: `Average` (default) or `Sum`.
        gradient_predivide_factor: divides gradients before the reduction and multiplies
            them after it; for `Average` only.
        average_aggregated_gradients: whether what was added up is divided by
            `backward_passes_per_step`.
        num_groups: deprecated: `groups`.
        groups: how many operations the gradients go in, or lists of variables that go
            together.
        process_set: the ranks over which gradients are reduced. On other ranks they
            stay those of the rank.
        scale_local_gradients: whether gradients of local variables
            (`register_local_var`) are divided by the number of ranks.

    Returns:
        The optimizer.

    Raises:
        ValueError: `optimizer` is neither, or options don't go together.
        NotImplementedError: Adasum.

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
            "use_locking=True is for the optimizers of TensorFlow 1; those of Keras "
            "have no such option. Leave it out."
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
