"""Horovod's learning rate callbacks, with its formulas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from tfdist.callbacks._base import RankCallback, base_optimizer
from tfdist.callbacks.learning_rate_warmup import longest_epoch, rescale_velocities
from tfdist.core import runtime
from tfdist.horovod._keras.all_ranks import MayBeOutside, trains_in_subset
from tfdist.horovod._warnings import warn_once
from tfdist.horovod.keras2._decay import settable_rate


class _NotGiven:
    def __repr__(self) -> str:
        return "(not given)"


_NOT_GIVEN: Any = _NotGiven()


class LearningRateScheduleCallback(MayBeOutside, RankCallback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` in some epochs.

    The rate is set in epochs with start_epoch <= epoch < end_epoch. With `staircase`,
    it is set at the beginning of the epoch, and `multiplier` receives the epoch as an
    integer. Without `staircase`, it is set before every batch, and `multiplier`
    receives

        epoch + batch / steps_per_epoch.

    A number m as multiplier means m ** (epoch - start_epoch). Horovod has computed this
    factor since 0.22.2 (its pull requests 3135 and 3142), although its documentation
    states `initial_lr * multiplier`. A number causes a warning, unless it is 1 or
    applies to a single epoch; pass a function to be explicit.

    Momentum correction: when the rate changes from a to b, the velocity of SGD and
    RMSprop is multiplied by b / a. In Keras 3, setting `optimizer.momentum` would have
    no effect. Horovod multiplies the momentum by b / a for one batch, which has the
    same effect on the next step, except in two cases: with `nesterov=True`, Horovod's
    factor applies twice in the update; with `backward_passes_per_step`, Horovod only
    corrects for the change of rate at the batch of the update.

    The epoch's logs contain the rate as "lr". With `decay=` of Keras 2, the callback
    sets and logs the rate before decay.

    Before Horovod 0.21, `initial_lr` did not exist and `multiplier` was the first
    argument. A call without `initial_lr` keeps that meaning, with a warning: the
    initial rate is the optimizer's rate at the start of the first `fit`, and a number
    as multiplier is a constant factor.

    Args:
        initial_lr: learning rate that is multiplied by the multiplier.
        multiplier: a number, or a function of the epoch.
        start_epoch: the first epoch in which the rate is set, counted from 0.
        end_epoch: the first epoch in which the rate is no longer set; None: no end.
        staircase: True: sets the rate once per epoch; False: before every batch.
        momentum_correction: whether to scale the velocities; default True.
        steps_per_epoch: number of steps per epoch, used without `staircase`; default:
            the largest number that `fit` reports on any rank of the process set.

    Raises:
        ValueError: `initial_lr=None` is given; or, at the start of `fit`, the number of
            steps is unknown, or the model's optimizer does not reduce gradients.
        TypeError: `multiplier` is missing; or, at the start of `fit`, the optimizer's
            rate is a schedule.

    Example:
        >>> import tfdist.horovod.keras as hvd
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(
        ...     initial_lr=0.1, multiplier=lambda epoch: 0.1, start_epoch=30)

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        section 3, remark 2 (arXiv:1706.02677).
    """

    def __init__(
        self,
        initial_lr: Any = _NOT_GIVEN,
        multiplier: float | Callable[[Any], float] = _NOT_GIVEN,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if callable(initial_lr) and multiplier is _NOT_GIVEN:
            multiplier, initial_lr = initial_lr, _NOT_GIVEN
        if multiplier is _NOT_GIVEN:
            raise TypeError(
                f"{type(self).__name__}() needs a multiplier: a function of the epoch, "
                "or a number."
            )
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self._rate_of_fit = initial_lr is _NOT_GIVEN
        if self._rate_of_fit:
            self._tell_old_call()
            if not callable(multiplier):
                factor = float(multiplier)
                multiplier = lambda epoch: factor  # noqa: E731
        self.initial_lr: Any = None if self._rate_of_fit else initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = (
            multiplier if callable(multiplier) else self._power(float(multiplier))
        )

    def _tell_old_call(self) -> None:
        warn_once(
            f"{type(self).__name__}(...) without initial_lr is a call for Horovod "
            "before 0.21: it uses the optimizer's learning rate at the start of the "
            "first fit. Write initial_lr=<that rate>."
        )

    def _power(self, factor: float) -> Callable[[Any], float]:
        if factor != 1 and (
            self.end_epoch is None or self.end_epoch - 1 > self.start_epoch
        ):
            warn_once(
                f"multiplier={factor:g} means {factor:g} ** (epoch - "
                f"{self.start_epoch}), as in Horovod since 0.22.2, not the constant "
                "factor that its documentation states. For a constant factor, write "
                f"multiplier=lambda epoch: {factor:g}."
            )
        start = self.start_epoch
        return lambda epoch: factor ** (epoch - start)

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the settings that determine the rates; the ranks compare them.

        Empty with a process set: the ranks of another set may use other rates.
        """
        if trains_in_subset(self.model):
            return {}
        return {
            "initial_lr": None if self._rate_of_fit else float(self.initial_lr),
            "start_epoch": self.start_epoch,
            "end_epoch": self.end_epoch,
            "staircase": bool(self.staircase),
            "momentum_correction": bool(self.momentum_correction),
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determines the number of steps, and the initial rate if none was given."""
        super().on_train_begin(logs)
        optimizer = base_optimizer(self.model)
        if not hasattr(settable_rate(optimizer), "assign"):
            raise TypeError(
                f"{type(self).__name__} sets the learning rate, but the rate of "
                f"{optimizer.name!r} is {optimizer._learning_rate!r}. Give the "
                "optimizer a number, or omit the callback."
            )
        if self.initial_lr is None:  # at the start of the first fit
            self.initial_lr = self._rate()
        if self.staircase:
            return
        own = self.steps_per_epoch or self.params.get("steps")
        if self._trains_here:
            steps = longest_epoch(own, "schedule.steps", self._ranks)
        else:
            steps = own
        if steps is None:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify "
                f"the steps_per_epoch parameter to the {type(self).__name__}()."
            )
        self.steps_per_epoch = steps

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the rate for the next step."""
        super().on_train_batch_begin(batch, logs)
        epoch = self._epoch
        ended = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        rate = settable_rate(base_optimizer(self.model))
        return float(keras.ops.convert_to_numpy(rate))

    def _set(self, epoch: float) -> None:
        before = self._rate()
        optimizer = base_optimizer(self.model)
        settable_rate(optimizer).assign(float(self.initial_lr * self.multiplier(epoch)))
        if self.momentum_correction:
            rescale_velocities(optimizer, before, self._rate())


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`.

    The rate is set before each batch. Let S be `steps_per_epoch`, the number of batches
    per epoch, and `size` the number of ranks. For batch b of epoch e, both counted from
    0, the rate is

        epoch = e + (b + 1) / S
        lr(epoch) = initial_lr / size * ((size - 1) * epoch / warmup_epochs + 1)

    The formula applies in the first `warmup_epochs` epochs; afterwards the callback
    does not change the rate. The formula is from Horovod's documentation (API,
    `LearningRateWarmupCallback`, "Math recap"), except that there epoch is e + b / S.
    Horovod's code (`_keras/callbacks.py`) adds 1 / S, so the last batch of the warm-up
    uses the full rate.

    A call without `initial_lr`, as before Horovod 0.21, uses the optimizer's rate at
    the start of the first `fit`, with a warning.

    Args:
        initial_lr: the rate after the warm-up: the rate of one process times the number
            of ranks.
        warmup_epochs: number of warm-up epochs; default 5; 0: no warm-up.
        momentum_correction: see `LearningRateScheduleCallback`; default True.
        steps_per_epoch: number of steps per epoch; default: the largest number that
            `fit` reports on any rank of the process set.
        verbose: 1: rank 0 prints a message when the warm-up ends; default 0.

    Raises:
        ValueError, TypeError: as in `LearningRateScheduleCallback`. ValueError also if
            `warmup_epochs` is a bool: before Horovod 0.21, the second parameter was
            `momentum_correction`.

    Example:
        >>> import tfdist.horovod.keras as hvd
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=3)

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        section 2.2 (arXiv:1706.02677).
    """

    def __init__(
        self,
        initial_lr: float = _NOT_GIVEN,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if isinstance(warmup_epochs, bool):
            raise ValueError(
                "Expected warmup_epochs to be a number of epochs, got "
                f"{warmup_epochs}. Before Horovod 0.21 momentum_correction was the "
                "second parameter. Write LearningRateWarmupCallback(initial_lr=..., "
                f"warmup_epochs={initial_lr}, momentum_correction={warmup_epochs})."
            )
        if isinstance(initial_lr, int) and initial_lr > 1:
            warn_once(
                f"LearningRateWarmupCallback({initial_lr}): the first argument is the "
                "learning rate initial_lr. If it should be a number of epochs, which "
                f"was first before Horovod 0.21, write warmup_epochs={initial_lr}."
            )
        super().__init__(
            initial_lr,
            self._multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _multiplier(self, epoch: float) -> float:
        epoch += 1 / (self.steps_per_epoch or 1)
        return warmup_multiplier(epoch, self.warmup_epochs, runtime.size())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs, and reports the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and runtime.rank() == 0:
            sys.stdout.write(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{self._rate():g}.\n"
            )


def warmup_multiplier(epoch: float, warmup_epochs: float, size: int) -> float:
    """Returns the factor by which the learning rate is multiplied during a warm-up.

    Args:
        epoch: 0 <= epoch <= warmup_epochs, may be fractional.
        warmup_epochs: above 0.
        size: number of ranks.

    Returns:
        1/size at the beginning, 1 at the end, linear in between.

    Example:
        >>> [warmup_multiplier(epoch, 2, 4) for epoch in (0, 1, 2)]
        [0.25, 0.625, 1.0]
    """
    return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)
