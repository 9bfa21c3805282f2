"""A learning rate times a factor, for numbers and for schedules.

A schedule is not settable, so it is replaced by a copy whose class is a subclass that
multiplies. The copy keeps the class's name and configuration: a saved model names the
plain schedule of Keras and loads without tfdist (and without the factor).
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
    """Mixin before a schedule's own class: its value times `_tfdist_factor`."""

    _tfdist_factor: tf.Variable

    def __call__(self, step: Any) -> Any:
        rate = tf.convert_to_tensor(super().__call__(step))  # type: ignore[misc]
        return rate * tf.cast(self._tfdist_factor, rate.dtype)


class ScalableRate:
    """The learning rate of an optimizer, as something that can be multiplied.

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
                f"LearningRateSchedule, got {rate!r}. Put the factor into your "
                "function, or make it a LearningRateSchedule."
            )
        self.base = self.get()

    @property
    def is_saved(self) -> bool:
        """Whether it is part of the optimizer's state; the factor of a schedule not."""
        return self._factor is None

    def is_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether this is the rate of that very optimizer."""
        return self._optimizer is optimizer

    def get(self) -> float:
        """The rate now; of a schedule: its factor."""
        if self._factor is not None:
            return float(self._factor)
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def set(self, value: float) -> None:
        """Sets the rate; of a schedule: its factor."""
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
    """The factors of schedules, which are no variables of their optimizers."""
    inner = [getattr(one, "inner_optimizer", one) for one in optimizers]
    rates = [getattr(one, "_learning_rate", None) for one in inner]
    return [rate._tfdist_factor for rate in rates if isinstance(rate, _Scaling)]


@functools.cache
def _scaling_class(cls: Any) -> Any:
    """The multiplying subclass of a schedule class, under the class's own name."""
    return subclass_under_own_name(cls, _Scaling, keras.optimizers.schedules, {})
