"""The gradient noise scale: the global batch beyond which larger batches gain little.

With G the gradient of the expected loss and S the covariance of the gradient of one
sample, the simple noise scale is tr(S) / |G|^2, in samples. The mean gradient g of B
samples has E|g|^2 = |G|^2 + tr(S) / B. Each step gives |g|^2 at two batch sizes: the
per-rank batch (before the reduction) and the global batch (after the reduction). These
two equations determine |G|^2 and tr(S).

References:
    McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of
    Large-Batch Training, 2018, equations 2.8 and A.2 (arXiv:1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.core.registry import WeakRegistry


def noise_scale(
    own_square: float, square: float, *, own_batch: float, batch: float
) -> float:
    """Returns the simple noise scale in samples; infinite if |G|^2 is not positive.

    Args:
        own_square: mean of |g|^2 over steps and ranks, with g the gradient of one
            rank's batch.
        square: mean of |g|^2 over steps, with g the gradient of the global batch.
        own_batch: the per-rank batch.
        batch: the global batch, larger than `own_batch`.

    Raises:
        ValueError: `batch` is not larger than `own_batch`.

    Example:
        >>> from tfdist.gradients.noise_scale import noise_scale
        >>> noise_scale(1 + 8 / 2, 1 + 8 / 4, own_batch=2, batch=4)  # |G|^2 = 1
        8.0
    """
    if not batch > own_batch:
        raise ValueError(
            f"Expected a global batch larger than the per-rank batch, got {batch} and "
            f"{own_batch}. The noise scale needs at least two ranks."
        )
    signal = (batch * square - own_batch * own_square) / (batch - own_batch)
    noise = (own_square - square) / (1 / own_batch - 1 / batch)
    if signal <= 0:
        return math.inf
    return max(noise, 0.0) / signal


def advice(scale: float, batch: float) -> str:
    """Returns a line that tells whether a larger or smaller global batch is useful.

    Training with a batch of B samples needs 1 + scale / B times as many steps as with
    very large batches, and 1 + B / scale times as many samples as with very small ones.

    Example:
        >>> from tfdist.gradients.noise_scale import advice
        >>> print(advice(2560, 256))
        gradient noise scale 2560, global batch 256: about 11.0 times the minimum \
number of steps and 1.1 times the minimum number of samples; larger batches, up to \
about 2560, need fewer steps
    """
    if math.isinf(scale):
        return (
            f"gradient noise scale unknown (global batch {batch:g}): the gradients are "
            "mostly noise; average over more steps"
        )
    steps, samples = 1 + scale / batch, 1 + (batch / scale if scale else math.inf)
    text = (
        f"gradient noise scale {scale:.0f}, global batch {batch:g}: about {steps:.1f} "
        f"times the minimum number of steps and {samples:.1f} times the minimum number "
        "of samples; "
    )
    if scale >= 2 * batch:
        return text + f"larger batches, up to about {scale:.0f}, need fewer steps"
    if scale > batch / 2:
        return text + "a good trade-off"
    return text + "a smaller batch needs fewer samples and hardly more steps"


class GradientSquares:
    """Sums of |g|^2 over steps, for this rank's gradients and for the reduced ones."""

    def __init__(self) -> None:
        with tf.init_scope():
            self._sums = tf.Variable(tf.zeros(3, tf.float64), trainable=False)

    def add(self, grads: Sequence[Any], reduced: Sequence[Any], scale: Any) -> None:
        """Adds the gradients of a step; skips a step with non-finite gradients.

        Args:
            grads: this rank's gradients; tensors, `tf.IndexedSlices`, or None.
            reduced: the reduced gradients.
            scale: the loss scale by which `grads` and `reduced` are multiplied.
        """
        own, total = _square(grads), _square(reduced)
        factor = tf.cast(scale, tf.float64) ** -2
        step = tf.stack([own * factor, total * factor, tf.ones([], tf.float64)])
        is_finite = tf.math.is_finite(own) & tf.math.is_finite(total)
        self._sums.assign_add(tf.where(is_finite, step, tf.zeros_like(step)))

    def take(self) -> tuple[float, float, float]:
        """Returns both sums and the number of steps, and resets them to 0."""
        own, total, steps = map(float, self._sums.numpy())
        self._sums.assign(tf.zeros(3, tf.float64))
        return own, total, steps


# Optimizer → the sums to which its traced steps add; None: not measured any more.
_measured: WeakRegistry[GradientSquares | None] = WeakRegistry()


def measure(optimizer: Any, squares: GradientSquares) -> None:
    """Records gradient norms in the steps of an optimizer that are traced from now on.

    Args:
        optimizer: a reducing optimizer.
        squares: the sums to which the steps add.
    """
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if one is not None:
            _measured.set(one, squares)


def stop_measuring(optimizer: Any) -> bool:
    """Undoes `measure` for steps traced from now on.

    Returns:
        Whether the optimizer was measured.
    """
    was_measured = _measured.get(optimizer) is not None
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if _measured.get(one) is not None:
            _measured.set(one, None)
    return was_measured


def note_step(
    optimizer: Any,
    grads: Sequence[Any],
    reduced: Sequence[Any],
    local: Collection[int] = (),
    is_weighted: bool = False,
) -> None:
    """Adds the gradients of a step to the sums, if the optimizer is measured.

    Args:
        optimizer: the reducing optimizer.
        grads: the gradients of this rank.
        reduced: the gradients after the reduction.
        local: indices of gradients that are not reduced.
        is_weighted: whether the ranks' gradients are weighted.

    Raises:
        NotImplementedError: the optimizer is measured and the gradients are weighted.
    """
    squares = _measured.get(optimizer)
    if squares is None:
        return
    if is_weighted:
        raise NotImplementedError(
            "The gradient noise scale needs batches of equal size, but this step "
            "weights the ranks (UnevenData, or weight=). Omit the weights or "
            "GradientNoiseScale."
        )
    shared = [i for i in range(len(grads)) if i not in local]
    squares.add(
        [grads[i] for i in shared],
        [reduced[i] for i in shared],
        getattr(optimizer, "dynamic_scale", 1.0),
    )


def _square(grads: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, in float64."""
    total = tf.zeros([], tf.float64)
    for grad in grads:
        if grad is None:
            continue
        if isinstance(grad, tf.IndexedSlices):  # a row may occur several times
            rows, places = tf.unique(tf.reshape(grad.indices, [-1]))
            grad = tf.math.unsorted_segment_sum(grad.values, places, tf.size(rows))
        flat = tf.cast(tf.reshape(grad, [-1]), tf.float32)
        total += tf.cast(tf.reduce_sum(flat * flat), tf.float64)
    return total
