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
from tfdist.horovod.tensorflow import keras as _with_tensorflow
from tfdist.horovod.tensorflow.keras import *  # noqa: F403
from tfdist.horovod.tensorflow.keras import Average, Compression, Sum

__all__ = list(_with_tensorflow.__all__)


def allreduce(  # type: ignore[no-redef]
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


def load_model(  # type: ignore[no-redef]
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
