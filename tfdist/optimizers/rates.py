"""Closed-form learning rates for large batches, as functions on numbers."""

from __future__ import annotations

import math

from tfdist.optimizers import _options


def scaled_rate(rate: float, *, global_batch: int, base_batch: int = 256) -> float:
    """Returns the learning rate for a batch size, by the linear scaling rule.

    A k times larger batch gets a k times larger learning rate.

    Args:
        rate: the learning rate for `base_batch`.
        global_batch: number of examples per step on all ranks together.
        base_batch: number of examples per step for which `rate` was tuned; default 256.

    Returns:
        rate * global_batch / base_batch.

    Raises:
        TypeError: `rate` is not a number, or a batch size is not an integer.
        ValueError: an argument is not above 0.

    Example:
        >>> from tfdist.optimizers import scaled_rate
        >>> scaled_rate(0.1, global_batch=8192)
        3.2

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        section 2.1 (arXiv:1706.02677).
    """
    _options.number("rate", rate, above=0)
    for name, batch in [("global_batch", global_batch), ("base_batch", base_batch)]:
        _options.integer(name, batch, at_least=1)
    return rate * global_batch / base_batch


def warmup_factor(step: float, warmup_steps: float, start: float) -> float:
    """Returns the factor of the learning rate during a gradual warm-up.

    Args:
        step: index of the step, from 0, counted over all epochs.
        warmup_steps: length W of the warm-up, in steps.
        start: the factor for step 0.

    Returns:
        start + (1 - start) * step / W before step W, and 1 from step W on.

    Example:
        >>> from tfdist.optimizers import warmup_factor
        >>> [warmup_factor(step, 4, 0.5) for step in (0, 2, 4, 9)]
        [0.5, 0.75, 1.0, 1.0]

    References:
        Goyal et al., 2017, section 2.2 (arXiv:1706.02677).
    """
    if step >= warmup_steps:
        return 1.0
    return start + (1 - start) * step / warmup_steps


def sgd_share(step: float, center: float, period: float) -> float:
    """Returns the share of SGD in a step of `RMSpropWarmup`.

    Args:
        step: index of the step, from 0, counted over all epochs.
        center: step at which the share is 1/2.
        period: inverse of the slope of the share at `center`, in steps.

    Returns:
        exp(2 (step - center) / period) / 2 before `center`, then 1/2 +
        (step - center) / period, and 1 from `center` + `period` / 2 on.

    Example:
        >>> from tfdist.optimizers import sgd_share
        >>> [round(sgd_share(step, 10, 5), 3) for step in (0, 9, 10, 12, 13)]
        [0.009, 0.335, 0.5, 0.9, 1.0]

    References:
        Akiba, Suzuki & Fukuda, Extremely Large Minibatch SGD: Training ResNet-50 on
        ImageNet in 15 Minutes, 2017, section 3 (arXiv:1711.04325). The paper prints the
        slope of the linear part as 2 / period; with this slope, the share would rise to
        1.5 before it becomes 1.
    """
    periods = (step - center) / period
    if periods < 0:
        return math.exp(2 * periods) / 2
    return min(0.5 + periods, 1.0)
