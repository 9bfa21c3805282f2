"""Exact mean gradients over accumulated micro-batches of unequal sizes.

Keras accumulates the gradients of `gradient_accumulation_steps` = n micro-batches in
variables and divides the sum by n. If each gradient g (of the mean over w samples) is
first multiplied by w, the result is sum(w g) / n. Each rank also accumulates
W = sum(w), so the mean over the rank's samples is n / W times the result of Keras. The
mean over the samples of all ranks is the mean of the ranks' means, weighted by W
(`sample_weights.share_of`).

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
    VLDB 2020, section 3.2.4 (one reduction for several micro-batches).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.local_variables import identity
from tfdist.collectives.variables import after_broadcast
from tfdist.gradients.sample_weights import exact, weighted

_logger = logging.getLogger("tfdist")
# Attributes of an optimizer that accumulates: W, and the weight of the current
# micro-batch (None: unweighted). They are hidden from Keras, which would save them.
_TOTAL, _OWN = "_tfdist_total_weight", "_tfdist_own_weight"
_weighted: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have a W


def begin(optimizer: Any, weight: Any) -> tf.Tensor | None:
    """Stores the weight of a micro-batch before its gradients are applied.

    Args:
        optimizer: the built Keras optimizer that accumulates.
        weight: number of samples, as a number or a scalar tensor; or None.

    Returns:
        The factor by which to multiply the gradients of the micro-batch: the weight as
        a float64 scalar. NaN if the weight is negative or not finite, None if there is
        no weight.

    Raises:
        ValueError: `weight` is not a scalar, or is None although earlier micro-batches
            had weights.
    """
    attributes = vars(optimizer)
    attributes[_OWN] = None
    if weight is None:
        if _TOTAL in attributes:
            raise ValueError(
                f"apply() of optimizer {optimizer.name!r} was called without a "
                "weight after a call with a weight. With gradient_accumulation_steps, "
                "pass a weight for every batch or for none."
            )
        return None
    if _TOTAL not in attributes:
        with tf.init_scope():
            attributes[_TOTAL] = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            _drop(optimizer)
        _weighted.add(optimizer)
    own = exact(weight)
    valid = tf.logical_and(tf.math.is_finite(own), own >= 0)
    own = tf.where(valid, own, tf.constant(float("nan"), tf.float64))
    attributes[_OWN] = own
    return own


def count(optimizer: Any) -> None:
    """Adds the weight of the current micro-batch to W, unless it has no weight.

    Called when the gradients of a micro-batch are added to the accumulators.
    """
    attributes = vars(optimizer)
    if attributes.get(_OWN) is not None:
        attributes[_TOTAL].assign_add(attributes[_OWN])


def means(optimizer: Any, grads: Any) -> tuple[Any, tf.Tensor | None]:
    """Returns the accumulated gradients as means over samples, and the sum of weights.

    Args:
        optimizer: the Keras optimizer that accumulates.
        grads: the sum of the accumulated gradients and those of the current
            micro-batch, divided by `gradient_accumulation_steps`.

    Returns:
        The mean gradients, and W plus the weight of the current micro-batch. Without
        weights, the unchanged gradients and None.
    """
    attributes = vars(optimizer)
    if attributes.get(_OWN) is None:
        return grads, None
    total = attributes[_TOTAL].read_value() + attributes[_OWN]
    steps = tf.constant(optimizer.gradient_accumulation_steps, tf.float64)
    factor = tf.math.divide_no_nan(steps, total)
    return [weighted(g, factor) for g in grads], total


def reset(optimizer: Any) -> None:
    """Sets W to 0; called when the accumulators are set to 0."""
    attributes = vars(optimizer)
    if attributes.get(_OWN) is not None:
        attributes[_TOTAL].assign(0.0)


def totals(optimizer: Any) -> list[tf.Variable]:
    """Returns the variable that holds W; an empty list if no batch had a weight."""
    return [vars(optimizer)[_TOTAL]] if _TOTAL in vars(optimizer) else []


def loaded(optimizer: Any) -> None:
    """Resets W after the optimizer's variables were loaded, because W is not saved."""
    if _TOTAL in vars(optimizer):
        vars(optimizer)[_TOTAL].assign(0.0)
        _drop(optimizer)


def _drop(optimizer: Any) -> None:
    """Discards accumulated micro-batches whose weights are unknown."""
    waiting = int(optimizer._iterations) % optimizer.gradient_accumulation_steps
    filled = [v for v in _accumulators(optimizer) if keras.ops.any(v)]
    if waiting and filled:
        for accumulator in filled:
            accumulator.assign(tf.zeros(accumulator.shape, accumulator.dtype))
        _logger.warning(
            "Optimizer %s has accumulated %d batches whose weights are unknown. Their "
            "gradients are excluded from the next update.",
            optimizer.name,
            waiting,
        )


def _accumulators(optimizer: Any) -> list[Any]:
    return [v for v in optimizer._accumulated_gradients if v is not None]


def _follow_broadcast(variables: Sequence[Any]) -> None:
    """Resets W if accumulators were broadcast, because W is not broadcast."""
    if not tf.executing_eagerly():
        return
    changed = set(map(identity, variables))
    for optimizer in list(_weighted):
        if not changed.isdisjoint(map(identity, _accumulators(optimizer))):
            loaded(optimizer)


after_broadcast.append(_follow_broadcast)
