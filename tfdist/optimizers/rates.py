"""Closed-form learning rates for large batches, as functions on numbers."""

from __future__ import annotations

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
