"""The exact mean over micro-batches of unequal sizes, of all ranks.

Keras adds up the gradients of `gradient_accumulation_steps` = n micro-batches in
variables and divides by n. Given w g in place of g, with w the number of samples and
g the gradient of their mean, that is sum(w g) / n. Beside it a rank adds up W = sum(w).
The mean over all its samples is then n / W times what Keras has, and that over the
samples of all ranks is the mean of these means with the weights W
(`sample_weights.share_of`).
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from tfdist.gradients.sample_weights import exact, weighted

_logger = logging.getLogger("tfdist")
# Attributes of an accumulating optimizer, past Keras, which would save them: W, and the
# weight of the micro-batch at hand (None: without weights).
_TOTAL, _OWN = "_tfdist_total_weight", "_tfdist_own_weight"


def begin(optimizer: Any, weight: Any) -> tf.Tensor | None:
    """Notes the weight of a micro-batch before it is applied.

    Args:
        optimizer: the built Keras optimizer that accumulates.
        weight: number of samples: a number or a scalar tensor; or None.

    Returns:
        What the gradients of the micro-batch have to be multiplied by, a float64
        scalar, NaN where the weight is not finite and >= 0; None without a weight.

    Raises:
        ValueError: `weight` is no scalar, or None where others have been given.
    """
    attributes = vars(optimizer)
    attributes[_OWN] = None
    if weight is None:
        if _TOTAL in attributes:
            raise ValueError(
                f"apply() of optimizer {optimizer.name!r} was called without a "
                "weight, but with one before. With gradient_accumulation_steps give "
                "every batch its weight, or none."
            )
        return None
    if _TOTAL not in attributes:
        with tf.init_scope():
            attributes[_TOTAL] = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            _drop(optimizer)
    own = exact(weight)
    valid = tf.logical_and(tf.math.is_finite(own), own >= 0)
    own = tf.where(valid, own, tf.constant(float("nan"), tf.float64))
    attributes[_OWN] = own
    return own


def count(optimizer: Any) -> None:
    """Adds the weight of the micro-batch at hand, which is not skipped."""
    attributes = vars(optimizer)
    if attributes.get(_OWN) is not None:
        attributes[_TOTAL].assign_add(attributes[_OWN])


def means(optimizer: Any, grads: Any) -> tuple[Any, tf.Tensor | None]:
    """Returns the accumulated gradients as means over samples, and the sum of weights.

    Args:
        optimizer: the Keras optimizer that accumulates.
        grads: sums divided by `gradient_accumulation_steps`.

    Returns:
        The gradients and W, from which counting begins anew; without weights the
        gradients as they are, and None.
    """
    attributes = vars(optimizer)
    if attributes.get(_OWN) is None:
        return grads, None
    total = attributes[_TOTAL].read_value()
    steps = tf.constant(optimizer.gradient_accumulation_steps, tf.float64)
    factor = tf.math.divide_no_nan(steps, total)
    with tf.control_dependencies([total]):
        attributes[_TOTAL].assign(0.0)
    return [weighted(g, factor) for g in grads], total


def totals(optimizer: Any) -> list[tf.Variable]:
    """The variable of W; none where no batch had a weight."""
    return [vars(optimizer)[_TOTAL]] if _TOTAL in vars(optimizer) else []


def loaded(optimizer: Any) -> None:
    """After the optimizer's variables have got other values: W is not among them."""
    if _TOTAL in vars(optimizer):
        vars(optimizer)[_TOTAL].assign(0.0)
        _drop(optimizer)


def _drop(optimizer: Any) -> None:
    """Leaves out micro-batches whose weights are not known."""
    waiting = int(optimizer._iterations) % optimizer.gradient_accumulation_steps
    if waiting:
        for accumulator in optimizer._accumulated_gradients:
            if accumulator is not None:
                accumulator.assign(tf.zeros(accumulator.shape, accumulator.dtype))
        _logger.warning(
            "Optimizer %s has accumulated %d batches whose weights are not known: they "
            "are left out of its next update.",
            optimizer.name,
            waiting,
        )
