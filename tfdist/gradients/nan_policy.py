"""Checks for non-finite gradients, with the same result on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.core.process_sets import ProcessSet

# Actions of an optimizer in a step with a non-finite gradient.
NAN_POLICIES = ("raise", "skip_step")


def check_nan_policy(nan_policy: str | None) -> None:
    """Raises ValueError unless `nan_policy` is None or one of `NAN_POLICIES`."""
    if nan_policy is None or nan_policy in NAN_POLICIES:
        return
    names = " or ".join(repr(name) for name in NAN_POLICIES)
    raise ValueError(f"Expected nan_policy=None, {names}, got {nan_policy!r}.")


def all_finite(grads: Sequence[Any]) -> tf.Tensor:
    """Returns a scalar bool: True if no gradient contains an infinity or a NaN.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.nan_policy import all_finite
        >>> bool(all_finite([tf.constant([1.0]), tf.constant([2.0, float("nan")])]))
        False
    """
    return tf.reduce_all(tf.stack([tf.constant(True), *map(_is_finite, grads)]))


def true_on_all_ranks(
    found: tf.Tensor, process_set: ProcessSet | None, name: str | None = None
) -> tf.Tensor:
    """Returns the logical AND of `found` over the ranks, on every rank.

    Args:
        found: this rank's value, a scalar bool.
        process_set: the ranks that take part; None: all ranks.
        name: name of the gradient list (`ReduceOptions.name`).
    """
    return collectives.allreduce(
        found,
        op=collectives.ReduceOp.LOGICAL_AND,
        name=None if name is None else f"{name}.finite",
        process_set=process_set,
    )


def assert_finite(
    is_finite: tf.Tensor, grads: Sequence[tuple[Any, str]], optimizer: str
) -> tf.Operation:
    """Returns an operation that raises an error unless `is_finite` is True.

    Args:
        is_finite: scalar bool, the same on all ranks.
        grads: gradients with the paths of their variables, for the message.
        optimizer: name of the optimizer, for the message.

    Raises:
        tf.errors.InvalidArgumentError: on all ranks, when the operation runs and
            `is_finite` is False.
    """

    def fail() -> tf.Tensor:
        paths = tf.constant([path for _, path in grads])
        flags = tf.stack([_is_finite(g) for g, _ in grads])
        what = (  # without quotation marks, which TensorFlow would escape
            f"the gradient of a step of optimizer {optimizer} is not finite; the step "
            "has not changed any variable. Lower the learning rate, clip the gradient, "
            "or skip such steps with the nan_policy skip_step. Variables with a "
            "non-finite gradient on this rank (may be none):"
        )
        bad = tf.boolean_mask(paths, tf.logical_not(flags))
        with tf.control_dependencies([tf.debugging.Assert(False, [what, bad], 10)]):
            return tf.constant(False)

    return tf.cond(is_finite, lambda: tf.constant(True), fail)


def _is_finite(grad: Any) -> tf.Tensor:
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    if not (values.dtype.is_floating or values.dtype.is_complex):
        return tf.constant(True)
    if values.dtype.is_complex:
        values = tf.stack([tf.math.real(values), tf.math.imag(values)])
    return tf.reduce_all(tf.math.is_finite(values))
