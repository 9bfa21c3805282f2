"""`decay=` of Keras 2: rate / (1 + decay * steps), with an adjustable initial rate."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.core.keras_subclass import subclass_under_own_name


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
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    if isinstance(rate, _Settable):
        return rate.initial_learning_rate
    return inner.learning_rate


def _number(rate: Any) -> float:
    return float(keras.ops.convert_to_numpy(rate))
