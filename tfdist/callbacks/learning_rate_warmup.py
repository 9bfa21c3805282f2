"""LearningRateWarmup: from the rate of one process to that of all, step by step."""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist import _runtime, collectives
from tfdist._process_sets import ProcessSet, members_of
from tfdist.callbacks._base import RankCallback, base_optimizer
from tfdist.callbacks._rates import ScalableRate
from tfdist.optimizers import MomentumSGD, warmup_factor


class LearningRateWarmup(RankCallback):
    """Raises the learning rate linearly, per step, during the first epochs.

    The optimizer's rate is the target, i.e. already scaled for `size` ranks, those that
    train the model (see `LearningRateScale`). Step i of the W = warmup_epochs *
    steps_per_epoch steps uses

        rate(i) = target / size * (1 + (size - 1) * i / W),    i = 0 ... W,

    the rate of one process at first, the target from step W on; after that the
    callback leaves the rate alone. A schedule is multiplied by rate(i) / target.

    Momentum correction: Keras SGD keeps the learning rate inside its velocity,
    v <- m v - rate g, the form for which section 3, remark 2 of the paper asks to
    scale the velocity by rate(i) / rate(i-1) whenever the rate changes (equation 10).
    Setting `momentum` would do nothing: Keras reads it when it traces. So the
    callback scales the velocity variables, of SGD and of RMSprop with momentum, and of
    `tfdist.optimizers.MomentumSGD` and `LARS` unless they correct by themselves; other
    optimizers keep the rate outside of their momentum and need no correction.

    An optimizer is warmed up once, also over several calls of `fit`; another one, given
    to the same callback, anew.

    With `steps_per_execution=n` the rate changes every n steps, to the value of the
    first of them.

    Args:
        warmup_epochs: epochs of warm-up, may be a fraction; default 5.
        steps_per_epoch: default: what `fit` says, on the rank that has most; needed
            where it cannot know.
        momentum_correction: default True.
        target: rate at the end; default: the optimizer's when training starts. Needed
            when training resumes inside the warm-up.
        verbose: 1: rank 0 says when the warm-up is over; default 0.

    Raises:
        ValueError: `warmup_epochs` or `steps_per_epoch` is not above 0, or the latter
            is needed (on any rank: an error on all).
        TypeError: at the start of `fit`, if the rate is a function.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.LearningRateScale(),
        ...              tfdist.callbacks.LearningRateWarmup(warmup_epochs=5)]

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        sections 2.2 and 3 (arXiv:1706.02677).
    """

    def __init__(
        self,
        warmup_epochs: float = 5,
        *,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
        target: float | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if not warmup_epochs > 0:
            raise ValueError(f"Expected warmup_epochs above 0, got {warmup_epochs}.")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(
                f"Expected steps_per_epoch of at least 1, got {steps_per_epoch}."
            )
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self.target = target
        self.verbose = verbose
        self._rate: Any = None
        self._target = target
        self._size = 1
        self._acted = False
        self._done = False

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """What the rates follow from."""
        return {
            "warmup_epochs": self.warmup_epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "momentum_correction": self.momentum_correction,
            "target": self.target,
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the number of steps and takes over the rate."""
        super().on_train_begin(logs)
        own = self.steps_per_epoch or self.params.get("steps")
        steps = longest_epoch(own, "warmup.steps", self._ranks)
        if steps is None:
            raise ValueError(
                "The number of steps in an epoch is unknown. Write "
                "LearningRateWarmup(steps_per_epoch=...)."
            )
        self._steps = steps
        self._size = len(members_of(self._ranks))
        optimizer = base_optimizer(self.model)
        if self._rate is None or not self._rate.is_of(optimizer):
            self._target = self.target
            self._acted = self._done = False
        self._rate = ScalableRate(optimizer)
        if self._rate.needs_retrace:
            self.model.make_train_function(force=True)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the rate of the step that comes."""
        super().on_train_batch_begin(batch, logs)
        if self._done:
            return
        step = self._epoch * self._steps + batch
        total = self.warmup_epochs * self._steps
        if not self._acted and step > total:  # resumed after the warm-up
            self._done = True
            return
        if self._target is None:  # here, after all on_train_begin: whatever the order
            self._target = self._rate.get()
        self._acted = True
        rate = self.rate_at(step, total, self._target, self._size)
        self._change_rate(rate)
        if step >= total:
            self._done = True
            if self.verbose and _runtime.rank() == self._first:
                sys.stdout.write(f"\nWarm-up is over: learning rate {rate:.6g}.\n")

    @staticmethod
    def rate_at(step: int, total: float, target: float, size: int) -> float:
        """The rate of one step.

        Args:
            step: indexed from 0, over all epochs.
            total: steps of the warm-up.
            target: rate at its end.
            size: number of ranks.

        Returns:
            target / size at step 0, target from step `total` on, linear between.

        Example:
            >>> LearningRateWarmup.rate_at(5, 10, 0.4, 4)
            0.25
        """
        return target * warmup_factor(step, total, 1 / size)

    def _change_rate(self, rate: float) -> None:
        previous = self._rate.get()
        if rate == previous:
            return
        self._rate.set(rate)
        if self.momentum_correction:
            # The rate is a float32 variable: the ratio of what was really stored.
            rescale_velocities(base_optimizer(self.model), previous, self._rate.get())


def longest_epoch(
    own: int | None, name: str, process_set: ProcessSet | None
) -> int | None:
    """The number of steps of the rank that has most; all have to use the same.

    Args:
        own: this rank's; None: unknown.
        name: of the reduction.
        process_set: the ranks that train; None for all.

    Returns:
        The number; None, on all ranks, if one does not know its own.
    """
    unknown = own is None
    steps = own or 0
    if _runtime.size() > 1:
        steps, unknown = collectives.allreduce(
            tf.constant([steps, unknown], tf.int64),
            op=collectives.ReduceOp.MAX,
            name=name,
            process_set=process_set,
        ).numpy()
    return None if unknown else int(steps)


def rescale_velocities(optimizer: Any, before: float, now: float) -> None:
    """Multiplies the sums of updates in a built optimizer by the change of its rate.

    Args:
        optimizer: the one that has the rate.
        before: the rate with which they were summed; where it is 0 nothing is done.
        now: the rate of the next step.
    """
    if before > 0 and now != before and optimizer.built:
        _scale(velocities_of(optimizer), tf.constant(now / before, tf.float64))


def velocities_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables that hold a sum of updates, each with its learning rate in it."""
    if isinstance(optimizer, keras.optimizers.SGD):
        return [v.value for v in optimizer.momentums if v is not None]
    if isinstance(optimizer, MomentumSGD) and not optimizer.momentum_correction:
        return [v.value for v in optimizer.momentums if v is not None]
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return [v.value for v in optimizer._momentums if v is not None]
    return []


def _scale(variables: list[tf.Variable], factor: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))
