"""LearningRateWarmup: linear warm-up from the rate of one process to the full rate."""

from __future__ import annotations

import logging
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.callbacks._base import (
    RankCallback,
    base_optimizer,
    optimizer_of_one_rate,
)
from tfdist.callbacks._learning_rates import ScalableRate, Schedule
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.core.registry import WeakRegistry
from tfdist.optimizers import MomentumSGD, warmup_factor

_logger = logging.getLogger("tfdist")
# Optimizer → the rate that a warm-up has set last, and its target.
_warmups: WeakRegistry[tuple[float, float]] = WeakRegistry()


class LearningRateWarmup(RankCallback):
    """Raises the learning rate linearly, per step, during the first epochs.

    The optimizer's rate is the target: it is already scaled for the `size` ranks that
    train the model (see `LearningRateScale`). Of W = warmup_epochs * steps_per_epoch
    warm-up steps, step i uses

        rate(i) = target / size * (1 + (size - 1) * i / W),    i = 0 ... W.

    This is the rate of one process at step 0 and the target at step W; after step W the
    callback does not change the rate. A schedule is multiplied by rate(i) / target and
    needs no `target`.

    Momentum correction: Keras SGD includes the learning rate in its velocity,
    v <- m v - rate g. For this form, section 3, remark 2 of the paper scales the
    velocity by rate(i) / rate(i-1) whenever the rate changes (equation 10). Changing
    `momentum` instead would have no effect, because Keras reads it while tracing. The
    callback therefore scales the velocity variables of SGD, of RMSprop with momentum,
    and of `tfdist.optimizers.MomentumSGD` and `LARS` unless they do this themselves.
    The momentum of other optimizers does not include the rate and needs no correction.

    An optimizer is warmed up only once, even over several calls of `fit`. If the
    callback is used again with a different optimizer, that one is also warmed up.

    With `steps_per_execution=n` the rate changes every n steps, to the value of the
    first of these n steps.

    Training that is resumed at the beginning of an epoch, or at any step with
    `Elastic(start=...)`, continues the warm-up. If the rate is a number, the saved rate
    lies between the first rate and the target. The target is then computed from the
    saved rate and the numbers of ranks and steps, and rank 0 logs the target. Because
    of rounding, two adjacent targets may give the same saved rate; rank 0 then logs
    this, and you can select one with `target`. Also pass `target` if training is
    resumed with a different number of ranks or with different warm-up steps. If the
    list contains a `LearningRateScheduler`, its rate is the target.

    Without `Elastic`, a warm-up cannot be resumed within an epoch, because Keras
    numbers the remaining batches from 0. In this case use the schedule
    `tfdist.optimizers.Warmup` instead of this callback.

    Args:
        warmup_epochs: number of warm-up epochs, which may be fractional; default 5.
        steps_per_epoch: number of steps in an epoch; default: the number in `fit`, on
            the rank with the most steps. Required if `fit` does not know this number.
        momentum_correction: whether to scale velocities; default True.
        target: rate at the end of the warm-up; default: the optimizer's rate when
            training starts, or, if training was resumed, the rate computed from it. Not
            allowed for a schedule.
        verbose: 1: rank 0 prints when the warm-up is over; default 0.

    Raises:
        ValueError: `warmup_epochs`, `steps_per_epoch` or `target` is not above 0. At
            the start of `fit`: `steps_per_epoch` is missing on any rank, `target` is
            given for a schedule, or the model has no optimizer, or several that train
            with the gradients of all ranks.
        TypeError: at the start of `fit`: the rate is a function.

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
                f"Expected steps_per_epoch to be at least 1, got {steps_per_epoch}."
            )
        if target is not None and not target > 0:
            raise ValueError(f"Expected target above 0, got {target}.")
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self.target = target
        self.verbose = verbose
        self._rate: Any = None
        self._target: float | None = None
        self._size = 1
        self._acted = False
        self._done = False

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the settings that determine the learning rates."""
        return {
            "warmup_epochs": self.warmup_epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "momentum_correction": self.momentum_correction,
            "target": self.target,
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determines the number of steps and the target rate."""
        super().on_train_begin(logs)
        optimizer = optimizer_of_one_rate(self.model, type(self).__name__)
        self._check_target(optimizer)
        own = self.steps_per_epoch or self.params.get("steps")
        steps = longest_epoch(own, "warmup.steps", self._ranks)
        if steps is None:
            raise ValueError(
                "The number of steps in an epoch is unknown. Use "
                "LearningRateWarmup(steps_per_epoch=...)."
            )
        self._steps = steps
        self._size = len(members_of(self._ranks))
        if self._rate is None or not self._rate.is_of(optimizer):
            self._target = None
            self._acted = self._done = False
        self._rate = ScalableRate(optimizer)
        if self._rate.needs_retrace:
            self.model.make_train_function(force=True)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the rate of the next step."""
        super().on_train_batch_begin(batch, logs)
        if self._done:
            return
        step = self._epoch * self._steps + batch
        total = self.warmup_epochs * self._steps
        if not self._acted:  # on_train_begin of all callbacks has run
            self._acted = True
            self._target = self._take_over(step, total)
        if self._target is None:  # resumed after the warm-up
            self._done = True
            return
        rate = self.rate_at(step, total, self._target, self._size)
        self._change_rate(rate)
        _warmups.set(base_optimizer(self.model), (self._rate.get(), self._target))
        if step >= total:
            self._done = True
            if self.verbose and runtime.rank() == self._first:
                sys.stdout.write(f"\nWarm-up is over: learning rate {rate:.6g}.\n")

    def progress(self) -> list[Any]:
        """Returns the progress of the warm-up, for ranks that have taken fewer steps.

        Returns:
            The argument for `continue_from`.
        """
        set_before = _warmups.get(base_optimizer(self.model), None)
        return [self._target, self._acted, self._done, set_before]

    def continue_from(self, progress: list[Any]) -> None:
        """Continues a warm-up after the steps that another rank has taken.

        Args:
            progress: the result of `progress` on that rank.
        """
        self._target, self._acted, self._done, set_before = progress
        if set_before is not None:
            _warmups.set(base_optimizer(self.model), tuple(set_before))

    @staticmethod
    def rate_at(step: int, total: float, target: float, size: int) -> float:
        """Returns the rate of a step.

        Args:
            step: index of the step, from 0, over all epochs.
            total: number of warm-up steps.
            target: rate at the end of the warm-up.
            size: number of ranks.

        Returns:
            The rate: target / size at step 0, target from step `total` on, and linear
            in between.

        Example:
            >>> LearningRateWarmup.rate_at(5, 10, 0.4, 4)
            0.25
        """
        return target * warmup_factor(step, total, 1 / size)

    def _check_target(self, optimizer: keras.optimizers.Optimizer) -> None:
        rate = optimizer._learning_rate
        if self.target is not None and isinstance(rate, Schedule):
            raise ValueError(
                f"{type(self).__name__}(target={self.target!r}) was given for a "
                f"learning rate that is a schedule ({type(rate).__name__}). The "
                "warm-up multiplies a schedule by a factor that rises to 1, so it "
                "needs no target. Omit target, even when you resume training."
            )

    def _take_over(self, step: int, total: float) -> float | None:
        """Determines the target; after a resume, may also set the last step's rate.

        Returns:
            The target; None if the warm-up was already over.
        """
        optimizer = base_optimizer(self.model)
        taken = int(optimizer._iterations)
        resumed = step > 0 and taken > 0
        last = self._step_before(step) if resumed else step - 1
        if last >= total:
            return None
        if self.target is not None:  # rounded to the optimizer's dtype
            return float(type(self._rate_number())(self.target))
        now = self._rate.get()
        current, target = _warmups.get(optimizer, (None, None))
        if current == now:  # set by another LearningRateWarmup in an earlier fit
            return target
        if not resumed or self._is_set_elsewhere():
            return now
        if self._rate.is_saved:
            return self._target_after(last, total, taken)
        # The factor of a schedule is not saved, but the velocities are.
        self._rate.set(self.rate_at(last, total, now, self._size))
        return now

    def _step_before(self, step: int) -> int:
        """Returns the first step of the execution that precedes step `step`."""
        epoch, batch = divmod(step - 1, self._steps)
        return epoch * self._steps + batch - batch % int(self.model.steps_per_execution)

    def _is_set_elsewhere(self) -> bool:
        """Returns whether a LearningRateScheduler sets the rate of each epoch."""
        kind = keras.callbacks.LearningRateScheduler
        inner = [getattr(one, "callback", one) for one in self._listed]
        return any(isinstance(one, kind) for one in inner)

    def _rate_number(self) -> Any:
        """Returns the variable rate as a NumPy number of the variable's dtype."""
        rate = base_optimizer(self.model)._learning_rate
        return keras.ops.convert_to_numpy(rate)[()]

    def _target_after(self, last: int, total: float, taken: int) -> float:
        factor = self.rate_at(last, total, 1.0, self._size)
        target, is_exact = target_of(self._rate_number(), factor)
        if factor < 1 and runtime.rank() == self._first:
            _logger.warning(
                "LearningRateWarmup: the optimizer has taken %d steps, so its learning "
                "rate, %g, is assumed to be the rate of step %d of this warm-up, which "
                "rises to %g.%s If this is wrong, pass target=.",
                taken,
                self._rate.get(),
                last,
                target,
                ""
                if is_exact
                else " An adjacent target is also possible, because rates are rounded. "
                "To continue bitwise as without interruption, pass target=.",
            )
        return target

    def _change_rate(self, rate: float) -> None:
        previous = self._rate.get()
        if rate == previous:
            return
        self._rate.set(rate)
        if self.momentum_correction:
            # The rate is a float32 variable: use the ratio of the stored values.
            rescale_velocities(base_optimizer(self.model), previous, self._rate.get())


def longest_epoch(
    own: int | None, name: str, process_set: ProcessSet | None
) -> int | None:
    """Returns the number of steps on the rank with the most steps.

    Args:
        own: this rank's number of steps; None: unknown.
        name: name of the reduction.
        process_set: the ranks that train; None for all.

    Returns:
        The maximum; None on all ranks, if any rank's number is unknown.
    """
    unknown = own is None
    steps = own or 0
    if runtime.size() > 1:
        steps, unknown = collectives.allreduce(
            tf.constant([steps, unknown], tf.int64),
            op=collectives.ReduceOp.MAX,
            name=name,
            process_set=process_set,
        ).numpy()
    return None if unknown else int(steps)


def target_of(rate: Any, factor: float) -> tuple[float, bool]:
    """Computes the rate at the end of a warm-up from an intermediate rate.

    Args:
        rate: the rounded value of `target * factor`, a NumPy number.
        factor: factor of the step with that rate, above 0 and at most 1.

    Returns:
        The target, a number of the same dtype, and whether it is unique. Of several
        candidates it is the one with the fewest digits, most likely the user's value.

    Example:
        >>> import numpy as np
        >>> target_of(np.float32(0.1) * np.float32(0.5), 0.5)
        (0.10000000149011612, True)
    """
    kind = type(rate)
    middle = kind(float(rate) / factor)
    near = [middle]
    for limit in (-np.inf, np.inf):
        one = middle
        for _ in range(3):  # at most three numbers are rounded to `rate`
            one = np.nextafter(one, kind(limit))
            near.append(one)
    fitting = [one for one in near if kind(float(one) * factor) == rate] or [middle]
    return float(min(fitting, key=lambda one: len(str(one)))), len(fitting) == 1


def rescale_velocities(optimizer: Any, before: float, now: float) -> None:
    """Multiplies the velocities of a built optimizer by `now / before`.

    Args:
        optimizer: the optimizer with the rate.
        before: the rate contained in the velocities; if it is 0, nothing is done.
        now: the rate of the next step.
    """
    if before > 0 and now != before and optimizer.built:
        _scale(velocities_of(optimizer), tf.constant(now / before, tf.float64))


def velocities_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the velocity variables that contain the learning rate."""
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
