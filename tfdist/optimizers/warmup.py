"""Warmup: a gradual warm-up for any Keras learning-rate schedule."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfdist.optimizers import _options

_Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable(package="tfdist")
class Warmup(_Schedule):
    """A learning-rate schedule with a linear, per-step warm-up.

    With W = `warmup_steps`, the rate of step i is

        rate(i) = f(i) * schedule(i),    f(i) = start + (1 - start) * i / W for i < W,
                                         f(i) = 1 from step W on.

    With `delay=True`, schedule(max(i - W, 0)) is used in place of schedule(i): the rate
    rises to schedule(0), and the schedule begins after the warm-up. In both forms the
    warm-up factor f does not jump at step W.

    Steps are batches of one rank, even with `gradient_accumulation_steps`, where
    `optimizer.iterations` is the number of updates. A schedule cannot adjust the
    momentum; for this, see `momentum_correction` of `tfdist.optimizers.MomentumSGD`.

    Args:
        schedule: a `keras.optimizers.schedules.LearningRateSchedule`, or a float for a
            constant rate.
        warmup_steps: length of the warm-up in steps; 0 means no warm-up.
        start: the factor of the first step; default 0. Goyal et al. use 1 / k for a k
            times larger batch.
        delay: whether the schedule begins after the warm-up. Default False: warm-up and
            schedule both begin at the first step, as in papers that count epochs from
            the start of training.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: a rate or `warmup_steps` is below 0, or `start` is not in [0, 1].

    Example:
        >>> import keras
        >>> from tfdist.optimizers import Warmup
        >>> steps = keras.optimizers.schedules.PiecewiseConstantDecay([8], [0.4, 0.04])
        >>> rate = Warmup(steps, warmup_steps=4, start=0.25)
        >>> [round(float(rate(i)), 3) for i in (0, 2, 4, 8, 9)]
        [0.1, 0.25, 0.4, 0.4, 0.04]

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        section 2.2 (arXiv:1706.02677).
    """

    def __init__(
        self,
        schedule: Any,
        warmup_steps: int,
        *,
        start: float = 0.0,
        delay: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(schedule, _Schedule):
            if callable(schedule):
                raise TypeError(
                    "schedule: expected a LearningRateSchedule or a number, got "
                    f"{type(schedule).__name__}: {schedule!r}. Derive it from "
                    "keras.optimizers.schedules.LearningRateSchedule."
                )
            schedule = _options.number("schedule", schedule, at_least=0)
        self.schedule = schedule
        self.warmup_steps = _options.integer("warmup_steps", warmup_steps, at_least=0)
        self.start = _options.fraction("start", start)
        self.delay = _options.flag("delay", delay)

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step (integer scalar) as a scalar tensor."""
        if self.delay:
            steps_after = ops.cast(step, "int64") - self.warmup_steps
            rate = self._rate(ops.maximum(steps_after, ops.zeros_like(steps_after)))
        else:
            rate = self._rate(step)
        if not self.warmup_steps:
            return rate
        progress = ops.cast(step, rate.dtype) / ops.cast(self.warmup_steps, rate.dtype)
        rising = self.start + (1 - self.start) * progress
        return rate * ops.where(progress < 1, rising, ops.ones_like(rising))

    def _rate(self, step: Any) -> Any:
        if isinstance(self.schedule, _Schedule):
            return ops.convert_to_tensor(self.schedule(step))
        return ops.convert_to_tensor(self.schedule, dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, including the configuration of the schedule."""
        schedule = self.schedule
        if isinstance(schedule, _Schedule):
            schedule = keras.optimizers.schedules.serialize(schedule)
        return {
            "schedule": schedule,
            "warmup_steps": self.warmup_steps,
            "start": self.start,
            "delay": self.delay,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Warmup:
        """Creates a schedule from the result of `get_config`."""
        config = dict(config)
        if isinstance(config["schedule"], dict):
            config["schedule"] = keras.optimizers.schedules.deserialize(
                config["schedule"]
            )
        return cls(**config)
