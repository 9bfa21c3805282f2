"""Codecs, which encode gradients before the reduction and decode them afterwards.

To add a compressor, write a class with `encode` and `decode` and add it to `CODECS`.
The encoded tensors are summed elementwise, so a codec may change the values and the
dtype of a gradient, but not its shape.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import tensorflow as tf

_WIDE = (tf.float32, tf.float64)


class Codec(Protocol):
    """Encodes gradients for the reduction, and decodes the reduced gradients."""

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the tensor to reduce instead of `gradient`, with the same shape."""

    def decode(self, reduced: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the reduced gradient.

        Args:
            reduced: sum or average of the ranks' encoded gradients.
            dtype: dtype of the gradient before `encode`.
        """


class Exact:
    """Codec that sends gradients unchanged."""

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns `gradient` unchanged."""
        return gradient

    def decode(self, reduced: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns `reduced`, cast to `dtype`."""
        return tf.cast(reduced, dtype)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Codec that casts float32 and float64 gradients to a smaller type.

    The core adds the ranks' values in float32 and rounds the result once.

    Args:
        wire_type: the type in which gradients are sent.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.codec import Cast
        >>> codec = Cast(tf.bfloat16)
        >>> codec.encode(tf.constant([1.0])).dtype.name
        'bfloat16'
        >>> codec.encode(tf.constant([1])).dtype.name
        'int32'

    References:
        Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3 (sums of
        half-precision values in float32).
    """

    wire_type: tf.DType

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        """Casts float32 and float64 to the wire type; returns other types unchanged."""
        if gradient.dtype not in _WIDE:
            return gradient
        return tf.cast(gradient, self.wire_type)

    def decode(self, reduced: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns `reduced`, cast to `dtype`."""
        return tf.cast(reduced, dtype)


@dataclasses.dataclass(frozen=True)
class Predivided:
    """Codec that divides gradients before the reduction and multiplies them afterwards.

    This keeps sums within the range of the wire type. If the factor is a power of two,
    the results are bitwise the same as without it, except for numbers that are
    subnormal in the wire type. Only float32 and float64 gradients are divided; float16
    and bfloat16 gradients are unchanged, because they are added in float32.

    Args:
        codec: the codec that encodes the quotient.
        factor: the divisor, a finite number > 0.
    """

    codec: Codec
    factor: float

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the encoded quotient."""
        return self.codec.encode(_times(gradient, 1.0 / self.factor))

    def decode(self, reduced: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the decoded result times the factor."""
        return _times(self.codec.decode(reduced, dtype), self.factor)


# The codec for each value of `compression=`.
CODECS: dict[str | None, Codec] = {
    None: Exact(),
    "fp16": Cast(tf.float16),
    "bf16": Cast(tf.bfloat16),
}


def codec_of(compression: str | None, predivide_factor: float = 1.0) -> Codec:
    """Returns the codec for the options of a tape or an optimizer.

    Args:
        compression: a key of `CODECS`.
        predivide_factor: number by which gradients are divided before encoding.
    """
    codec = CODECS[compression]
    return codec if predivide_factor == 1.0 else Predivided(codec, predivide_factor)


def check_compression(compression: str | None) -> None:
    """Raises ValueError unless `compression` is a key of `CODECS`."""
    if compression is None or (isinstance(compression, str) and compression in CODECS):
        return
    names = " or ".join(repr(name) for name in CODECS if name is not None)
    raise ValueError(f"Expected compression=None, {names}, got {compression!r}.")


def check_predivide_factor(factor: Any) -> None:
    """Raises ValueError unless `factor` is a finite number > 0."""
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not (is_number and math.isfinite(factor) and factor > 0):
        raise ValueError(
            "Expected gradient_predivide_factor to be a finite number > 0, got "
            f"{factor!r}."
        )


def _times(gradient: tf.Tensor, factor: float) -> tf.Tensor:
    if gradient.dtype not in _WIDE:
        return gradient
    return gradient * tf.constant(factor, gradient.dtype)
