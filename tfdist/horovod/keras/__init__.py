"""`horovod.keras`: as `horovod.tensorflow.keras`, because there is one Keras now.

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
        value: of the same shape on all ranks.
        name: identifies the operation across ranks; default: its place in the program.
        average: whether the mean is returned, else the sum. (Horovod has this default,
            and refuses an `op` unless `average=None` is given with it.)
        prescale_factor: factor before the sum.
        postscale_factor: factor after it.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`, in place of `average`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        Tensor of the shape and type of `value`.

    Raises:
        ValueError: `op` and `average=False` are given.
        tf.errors.FailedPreconditionError: shapes, types or ops differ; on every rank.
    """
    if op is not None and average is False:
        raise ValueError(
            f"Expected op or average, got both: op={op!r}, average=False. op "
            "supersedes average: leave average out."
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
