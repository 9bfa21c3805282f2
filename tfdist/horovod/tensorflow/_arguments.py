"""Conversion of the arguments of Horovod's functions to those of tfdist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.horovod.common.reduce_ops import name_of


def reduce_op(op: Any) -> tfdist.ReduceOp:
    """The reduction of tfdist for one of Horovod's constants.

    Raises:
        NotImplementedError: Adasum.
        ValueError: it is no reduction.
    """
    return tfdist.ReduceOp[name_of(op)]


def scoped(name: str | None, ignore_name_scope: bool) -> str | None:
    """The name that pairs the calls of the ranks: with the name scope around it.

    Args:
        name: the user's; None, a name by the place of the call, has no scope in it.
        ignore_name_scope: whether to leave the scope out.
    """
    scope = "" if name is None or ignore_name_scope else tf.get_current_name_scope()
    return f"{scope}/{name}" if scope else name


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A tensor that is to be multiplied before and after its reduction.

    Attributes:
        value: what is reduced, by the operation itself times
        prescale: before, and
        postscale: after it.
        finish: makes the result of it.
    """

    value: tf.Tensor
    prescale: float
    postscale: float
    finish: Callable[[tf.Tensor], tf.Tensor]


def scaled(value: Any, op: tfdist.ReduceOp, before: float, after: float) -> Scaled:
    """Integers are scaled in float64 and cut towards zero; the rest by the operation.

    Args:
        value: tensor, NumPy array or variable.
        op: the reduction.
        before: factor before it.
        after: factor after it.
    """
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not dtype.is_integer or before == after == 1:
        return Scaled(tensor, float(before), float(after), lambda reduced: reduced)
    tensor = _times(tensor, before)
    if op is tfdist.ReduceOp.AVERAGE:  # cut once, after the division
        tensor = tf.cast(tensor, tf.float64)
        return Scaled(tensor, 1.0, float(after), lambda r: tf.cast(r, dtype))
    return Scaled(tensor, 1.0, 1.0, lambda reduced: _times(reduced, after))


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1:
        return tensor
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def scale_gradient(value: Any, factor: float) -> tf.Tensor:
    """The same tensor, whose gradient is multiplied by `factor`.

    Args:
        value: tensor, NumPy array or variable; integers are returned as they are.
        factor: of the gradient.
    """
    tensor = tf.convert_to_tensor(value)
    if factor == 1 or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor

    @tf.custom_gradient
    def scaled_back(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda dy: dy * tf.cast(factor, dy.dtype)

    return scaled_back(tensor)


def invalid(message: str) -> tf.errors.InvalidArgumentError:
    """Horovod's error for an argument that does not fit."""
    error = tf.errors.InvalidArgumentError(None, None, message)
    error.ag_pass_through = True  # AutoGraph raises it as it is
    return error
