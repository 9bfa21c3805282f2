"""`decay=` of Keras 2: rate / (1 + decay * steps), with an adjustable initial rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.core.keras_subclass import subclass_under_own_name
from tfdist.horovod.keras2._spelling import Patches

_APPLIES = "_tfdist_applies"  # attribute of an optimizer while `apply` runs


class _Settable:
    """Mixin for an `InverseTimeDecay` whose initial rate is a variable."""

    initial_learning_rate: Any

    def get_config(self) -> dict[str, Any]:
        """Returns the config of a plain schedule, so that it loads without tfdist."""
        config = dict(super().get_config())  # type: ignore[misc]
        return {**config, "initial_learning_rate": _number(self.initial_learning_rate)}


def decayed(optimizer: Any, decay: float) -> Any:
    """Returns a schedule for an optimizer's rate: rate / (1 + decay * steps).

    Args:
        optimizer: a Keras optimizer, created with a number as rate.
        decay: decay per step.

    Raises:
        ValueError: the optimizer's rate is a schedule.
    """
    rate = optimizer._learning_rate
    if not hasattr(rate, "assign"):
        raise ValueError(
            f"Expected a number as learning rate with decay={decay}, got {rate!r}. "
            "Put the decay into the schedule."
        )
    kind = keras.optimizers.schedules.InverseTimeDecay
    schedule = kind(_number(rate), 1, decay)
    schedule.__class__ = subclass_under_own_name(
        kind, _Settable, keras.optimizers.schedules, {}
    )
    schedule.initial_learning_rate = keras.Variable(
        _number(rate), trainable=False, name="initial_learning_rate", dtype="float32"
    )
    return schedule


def settable_rate(optimizer: Any) -> Any:
    """Returns the value of Keras 2's `optimizer.lr`.

    This is the variable of the rate or, with `decay`, of the initial rate. If the rate
    is any other schedule, the current rate is returned.
    """
    return getattr(optimizer, "inner_optimizer", optimizer).learning_rate


def install(patches: Patches) -> None:
    """Makes the initial rate of optimizers with `decay` their `learning_rate`.

    So it was in Keras 2, and callbacks read and assign it. In Keras 3, `learning_rate`
    is the current rate, which `apply` uses.
    """
    base = keras.optimizers.Optimizer
    for name, make in (("learning_rate", _initial_rate), ("apply", _with_current_rate)):
        owner = next(cls for cls in base.__mro__ if name in vars(cls))
        patches.wrap(owner, name, make)


def _initial_rate(original: property) -> property:
    read, assign = original.fget, original.fset

    def get_rate(self: Any) -> Any:
        rate = self._learning_rate
        if isinstance(rate, _Settable) and not vars(self).get(_APPLIES):
            return rate.initial_learning_rate
        return read(self)  # type: ignore[misc]

    def set_rate(self: Any, value: Any) -> None:
        rate = self._learning_rate
        if isinstance(rate, _Settable) and not callable(value):
            rate.initial_learning_rate.assign(value)
        else:
            assign(self, value)  # type: ignore[misc]

    return property(get_rate, set_rate)


def _with_current_rate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **named: Any) -> Any:
        vars(self)[_APPLIES] = True
        try:
            return original(self, *args, **named)
        finally:
            vars(self).pop(_APPLIES, None)

    return apply


def _number(rate: Any) -> float:
    return float(keras.ops.convert_to_numpy(rate))
