"""Gradients in fewer bytes on the way between the ranks.

A gradient is cast to a shorter type before it is reduced and back after it. The core
adds the ranks' values in float32 and rounds the result once. To add a type is to add
a row of `WIRE_TYPES`.

Divided before and multiplied after, a gradient keeps its place in the range of the type
that is sent. Powers of two change no bits, except of what is subnormal in that type.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

# What the user writes → what is sent.
WIRE_TYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


def check_compression(compression: str | None) -> None:
    """Raises ValueError unless it is None or a name of `WIRE_TYPES`."""
    if compression is None or (
        isinstance(compression, str) and compression in WIRE_TYPES
    ):
        return
    names = " or ".join(repr(name) for name in WIRE_TYPES)
    raise ValueError(f"Expected compression=None, {names}, got {compression!r}.")


def wire_type(dtype: tf.DType, compression: str | None) -> tf.DType:
    """The type in which a gradient of `dtype` is reduced.

    Args:
        dtype: of the gradient.
        compression: None or a name of `WIRE_TYPES`.

    Returns:
        `dtype` itself without compression, and for types that it would not shorten.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.compression import wire_type
        >>> wire_type(tf.float32, "bf16").name, wire_type(tf.int32, "bf16").name
        ('bfloat16', 'int32')
    """
    if compression is None or dtype not in (tf.float32, tf.float64):
        return dtype
    return WIRE_TYPES[compression]


def compress(gradient: tf.Tensor | None, compression: str | None) -> tf.Tensor | None:
    """The gradient as it is sent; None stays None."""
    if gradient is None:
        return None
    return tf.cast(gradient, wire_type(gradient.dtype, compression))


def restore(reduced: tf.Tensor | None, gradient: tf.Tensor | None) -> tf.Tensor | None:
    """Casts a reduced gradient back to the dtype of the rank's own `gradient`."""
    if reduced is None or gradient is None:
        return reduced
    return tf.cast(reduced, gradient.dtype)


def check_predivision(factor: Any) -> None:
    """Raises ValueError unless it is a finite number > 0."""
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not (is_number and math.isfinite(factor) and factor > 0):
        raise ValueError(
            "Expected gradient_predivide_factor to be a finite number > 0, got "
            f"{factor!r}."
        )


def divided(gradient: tf.Tensor | None, factor: float) -> tf.Tensor | None:
    """The gradient times 1/factor, if it is float32 or float64.

    Half types are added in float32 as they are, and have nothing to gain.
    """
    return _times(gradient, 1.0 / factor)


def multiplied(gradient: tf.Tensor | None, factor: float) -> tf.Tensor | None:
    """Multiplies a gradient by `factor`; the inverse of `divided`."""
    return _times(gradient, factor)


def _times(gradient: tf.Tensor | None, factor: float) -> tf.Tensor | None:
    if gradient is None or factor == 1.0:
        return gradient
    if gradient.dtype not in (tf.float32, tf.float64):
        return gradient
    return gradient * tf.constant(factor, gradient.dtype)
