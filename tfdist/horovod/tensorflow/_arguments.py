"""Converts the arguments of Horovod's functions to those of tfdist's functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.gradients.options import size_when_run
from tfdist.horovod.common.reduce_ops import name_of


def reduce_op(op: Any) -> tfdist.ReduceOp:
    """Returns the tfdist reduction for one of Horovod's constants.

    Raises:
        ValueError: `op` is not a reduction.
    """
    return tfdist.ReduceOp[name_of(op)]


def scoped(name: str | None, ignore_name_scope: bool) -> str | None:
    """Returns the operation name, with the current name scope as prefix.

    Args:
        name: the user's name. None stays None: default names do not include a scope.
        ignore_name_scope: whether to omit the scope.
    """
    scope = "" if name is None or ignore_name_scope else tf.get_current_name_scope()
    return f"{scope}/{name}" if scope else name


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A tensor, and how to scale it before and after its reduction.

    Attributes:
        value: the tensor to reduce.
        prescale: factor that the operation applies before the reduction.
        postscale: factor that the operation applies after the reduction.
        finish: function that converts the operation's result to the final result.
    """

    value: tf.Tensor
    prescale: float
    postscale: float
    finish: Callable[[tf.Tensor], tf.Tensor]


def scaled(value: Any, op: tfdist.ReduceOp, before: float, after: float) -> Scaled:
    """Prepares a tensor and its scale factors for a reduction.

    Floating-point tensors are scaled by the reduction itself. Integers are scaled
    outside it, in float64, and the result is truncated toward zero.

    Args:
        value: tensor, NumPy array or variable.
        op: the reduction.
        before: factor applied before the reduction.
        after: factor applied after the reduction.
    """
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not dtype.is_integer or before == after == 1:
        return Scaled(tensor, float(before), float(after), lambda reduced: reduced)
    tensor = _times(tensor, before)
    if op is tfdist.ReduceOp.AVERAGE:  # truncated once, after the division
        tensor = tf.cast(tensor, tf.float64)
        return Scaled(tensor, 1.0, float(after), lambda r: tf.cast(r, dtype))
    return Scaled(tensor, 1.0, 1.0, lambda reduced: _times(reduced, after))


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1:
        return tensor
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def scale_gradient(
    value: Any,
    members: tfdist.ProcessSet | None,
    factor_of: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns `value` as a tensor whose gradient is multiplied by a factor.

    Args:
        value: tensor, NumPy array or variable; integers have no gradient and are only
            converted.
        members: the ranks that take part in the operation; None: all ranks.
        factor_of: returns the factor for a number of ranks, a float64 scalar. The
            factor for one rank is 1.
    """
    tensor = tf.convert_to_tensor(value)
    has_gradient = tensor.dtype.is_floating or tensor.dtype.is_complex
    if not has_gradient or size_when_run(members) is None:
        return tensor

    def scaled_gradient(dy: tf.Tensor) -> tf.Tensor:
        return dy * tf.cast(factor_of(size_when_run(members)), dy.dtype)

    @tf.custom_gradient
    def scaled_back(x: tf.Tensor) -> Any:
        return tf.identity(x), scaled_gradient

    return scaled_back(tensor)


def invalid(message: str) -> tf.errors.InvalidArgumentError:
    """Returns the error that Horovod raises for an invalid argument."""
    error = tf.errors.InvalidArgumentError(None, None, message)
    error.ag_pass_through = True  # AutoGraph raises it unchanged
    return error
