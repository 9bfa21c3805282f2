"""Compression.none and Compression.fp16.

`Compression.fp16` sends float32 and float64 tensors as float16; tfdist sums them in
float32 and rounds the result once. A custom class with the methods `compress` and
`decompress` can be used instead.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.gradients.codec import check_compression


class Compressor:
    """Interface of a compression: the static methods `compress` and `decompress`."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and a context for `decompress`."""
        raise NotImplementedError("A Compressor must define compress(tensor).")

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Undoes `compress` on the reduced tensor; `ctx` is the context it returned."""
        raise NotImplementedError("A Compressor must define decompress(tensor, ctx).")


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        """Returns the tensor unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor unchanged."""
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16.

    Example:
        >>> import tensorflow as tf
        >>> sent, ctx = FP16Compressor.compress(tf.constant([1.0]))
        >>> sent.dtype.name, FP16Compressor.decompress(sent, ctx).dtype.name
        ('float16', 'float32')
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Returns float32 and float64 as float16, others as is; and the old dtype."""
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Returns the tensor in its original dtype."""
        return tf.cast(tensor, ctx)


class Compression:
    """The available compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_methods(compression: Any) -> None:
    """Raises TypeError unless `compression` has both `compress` and `decompress`."""
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise TypeError(
                "Expected hvd.Compression.none, hvd.Compression.fp16 or a class with "
                f"compress and decompress, got {compression!r}."
            )


def wire_name(compression: Any) -> str | None:
    """Returns tfdist's name of a compression: None, "fp16" or "bf16".

    A tfdist name is returned unchanged.

    Raises:
        TypeError: the argument is neither a name nor has the methods of a compression.
        ValueError: tfdist has no compression with this name.
        LookupError: the compression is a custom class, which tfdist has no name for.
    """
    if compression is None or isinstance(compression, str):
        check_compression(compression)
        return compression
    check_methods(compression)
    kind = compression if isinstance(compression, type) else type(compression)
    if kind is NoneCompressor:
        return None
    if kind is FP16Compressor:
        return "fp16"
    raise LookupError(f"{kind.__name__} has its own methods")
