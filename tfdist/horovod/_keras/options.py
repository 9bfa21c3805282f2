"""Horovod's values of options as those of tfdist."""

from __future__ import annotations

import functools
import logging
from typing import Any

from tfdist.collectives import ReduceOp
from tfdist.horovod.common import reduce_ops
from tfdist.horovod.tensorflow.compression import wire_name

_logger = logging.getLogger("tfdist")


def reduction(op: Any) -> ReduceOp:
    """`hvd.Average` or `hvd.Sum`, for gradients.

    Raises:
        ValueError: it is another one; of Adasum the message is Horovod's.

    Example:
        >>> from tfdist.horovod.common.reduce_ops import Sum
        >>> reduction(Sum).name
        'SUM'
    """
    if op is reduce_ops.Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    named = getattr(ReduceOp, reduce_ops.name_of(op))
    if named not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"op currently only supports Average and Sum, got {named.name}: other "
            "reductions of gradients do not train a model."
        )
    return ReduceOp(named)


def wire_type(compression: Any) -> str | None:
    """What tfdist calls `hvd.Compression.none` or `hvd.Compression.fp16`.

    Args:
        compression: one of these, or a name of tfdist: None, "fp16", "bf16".

    Raises:
        ValueError: it is something else.
    """
    if compression is None or isinstance(compression, str):
        return compression
    try:
        return wire_name(compression)
    except (TypeError, LookupError):
        raise ValueError(
            "Expected compression=hvd.Compression.none or hvd.Compression.fp16 (or "
            f"'bf16'), got {compression!r}: gradients are cast inside of the "
            "reduction, where compressors of your own are not called."
        ) from None


@functools.cache
def note_device(parameter: str, device: str) -> None:
    """Says once that a device for communication is not chosen here.

    Args:
        parameter: name of the parameter.
        device: "" (nothing is said) or a name of TensorFlow's.
    """
    if device:
        _logger.warning(
            "%s=%r is not needed: gradients and variables are reduced in host memory, "
            "wherever they are computed. Leave it out.",
            parameter,
            device,
        )
