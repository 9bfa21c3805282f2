"""SyncBatchNormalization: batch normalization over the examples of all ranks."""

from __future__ import annotations

from typing import Any

from tfdist import layers


class _Kind(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return layers.is_synchronized(one)


class SyncBatchNormalization(metaclass=_Kind):
    """Creates a `keras.layers.BatchNormalization` over the batches of all ranks.

    The mean and variance are computed over the examples of all ranks, which may have
    different numbers of examples. The layer is saved as Keras's own class and loads
    without tfdist; `isinstance(layer, hvd.SyncBatchNormalization)` is True.

    Args:
        fused: must be False: Keras 3 has no fused layer.
        **kwargs: arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is not False, or an argument is out of range.
        TypeError: Keras's layer does not accept an argument.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> isinstance(hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization)
        True
    """

    def __new__(cls, fused: bool = False, **kwargs: Any) -> Any:  # noqa: D102
        if fused in (True, None):
            raise ValueError(
                f"SyncBatchNormalization does not support fused={fused!r}. Omit fused."
            )
        return layers.SyncBatchNormalization(**kwargs)

    def __init_subclass__(cls) -> None:
        raise TypeError(
            "hvd.SyncBatchNormalization cannot be subclassed: it creates a layer of "
            "Keras's class. Subclass keras.layers.BatchNormalization without "
            "overriding call or _moments, and convert the layer: "
            "tfdist.layers.synchronize_batch_normalization(layer)."
        )
