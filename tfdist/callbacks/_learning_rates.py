"""Scales a learning rate, which may be a number or a schedule.

The values of a schedule cannot be set, so the schedule is replaced by a copy whose
class is a subclass that multiplies the values by a factor. The copy keeps the class
name and configuration: a saved model contains the plain Keras schedule and loads
without tfdist (and without the factor).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.core.keras_subclass import subclass_under_own_name

Schedule = keras.optimizers.schedules.LearningRateSchedule


class _Scaling:
    """Mixin that multiplies the rate of a schedule by `_tfdist_factor`.

    It has to precede the schedule's own class in the bases.
    """

    _tfdist_factor: tf.Variable

    def __call__(self, step: Any) -> Any:
        rate = tf.convert_to_tensor(super().__call__(step))  # type: ignore[misc]
        return rate * tf.cast(self._tfdist_factor, rate.dtype)


class ScalableRate:
    """A learning rate that can be scaled, whether it is a number or a schedule.

    Args:
        optimizer: a Keras optimizer whose rate is a number or a schedule.

    Raises:
        TypeError: the rate is a function.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        rate = optimizer._learning_rate
        self._optimizer = optimizer
        self.needs_retrace = False
        self._factor: tf.Variable | None = None
        if isinstance(rate, Schedule):
            self._factor = self._replace_schedule(rate)
        elif not hasattr(rate, "assign"):
            raise TypeError(
                "Expected an optimizer whose learning_rate is a float or a "
                f"LearningRateSchedule, got {rate!r}. Multiply by the factor in your "
                "function, or convert the function to a LearningRateSchedule."
            )
        self.base = self.get()

    @property
    def is_saved(self) -> bool:
        """Returns whether the optimizer saves the rate; it saves no schedule factor."""
        return self._factor is None

    def is_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether this is the current rate of `optimizer`."""
        return self._optimizer is optimizer

    def get(self) -> float:
        """Returns the current rate; for a schedule, its factor."""
        if self._factor is not None:
            return float(self._factor)
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def set(self, value: float) -> None:
        """Sets the rate; for a schedule, its factor."""
        if self._factor is not None:
            self._factor.assign(value)
        else:
            self._optimizer.learning_rate = value

    def _replace_schedule(self, schedule: Any) -> tf.Variable:
        if isinstance(schedule, _Scaling):
            return schedule._tfdist_factor
        scaled = copy.copy(schedule)
        scaled.__class__ = _scaling_class(type(schedule))  # type: ignore[arg-type]
        scaled._tfdist_factor = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        self._optimizer.learning_rate = scaled
        self.needs_retrace = True
        return scaled._tfdist_factor


def factors_of(optimizers: list[keras.optimizers.Optimizer]) -> list[tf.Variable]:
    """Returns the factors of schedules, which are not optimizer variables."""
    inner = [getattr(one, "inner_optimizer", one) for one in optimizers]
    rates = [getattr(one, "_learning_rate", None) for one in inner]
    return [rate._tfdist_factor for rate in rates if isinstance(rate, _Scaling)]


@functools.cache
def _scaling_class(cls: Any) -> Any:
    """Returns the multiplying subclass of a schedule class, with the same name."""
    return subclass_under_own_name(cls, _Scaling, keras.optimizers.schedules, {})
