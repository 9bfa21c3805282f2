"""`horovod.keras`: same as `horovod.tensorflow.keras`, since there is only one Keras.

Example:
    >>> import keras
    >>> import tfdist.horovod.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.horovod.tensorflow import keras as _with_tensorflow
from tfdist.horovod.tensorflow.keras import *  # noqa: F403
from tfdist.horovod.tensorflow.keras import Average, Compression, Sum

__all__ = list(_with_tensorflow.__all__)


def allreduce(  # type: ignore[no-redef]
    value: Any,
    name: str | None = None,
    average: bool | None = True,
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
        average: whether to return the mean instead of the sum. (Horovod has the same
            default, and rejects an `op` unless `average=None` is also given.)
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after the reduction.
        op: `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`; overrides `average`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        Tensor with the shape and dtype of `value`.

    Raises:
        ValueError: both `op` and `average=False` are given.
        tf.errors.FailedPreconditionError: shapes, dtypes or ops differ between the
            ranks; raised on every rank.
    """
    if op is not None and average is False:
        raise ValueError(
            f"Expected op or average, got both: op={op!r}, average=False. op "
            "supersedes average: omit average."
        )
    by_average = Sum if average is False else Average
    return _with_tensorflow.allreduce(
        value,
        name,
        op=by_average if op is None else op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )
