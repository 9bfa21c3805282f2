"""The base class of the optimizers of this package."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options


class OptimizerWithExclusions(keras.optimizers.Optimizer):
    """Base class that checks options, applies `exclude`, and makes gradients dense.

    Subclasses apply the weight decay in `update_step`. The arguments are those of
    `MomentumSGD`.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        weight_decay: float | None = None,
        exclude: _exclusions.Exclude = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(learning_rate):
            learning_rate = _options.number("learning_rate", learning_rate, at_least=0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name: expected a string or None, got {name!r}.")
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue}
        clips |= {"global_clipnorm": global_clipnorm}
        clips |= {"loss_scale_factor": loss_scale_factor}
        counts = {"ema_overwrite_frequency": (ema_overwrite_frequency, 1)}
        counts |= {"gradient_accumulation_steps": (gradient_accumulation_steps, 2)}
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=None
            if weight_decay is None
            else _options.number("weight_decay", weight_decay, at_least=0),
            use_ema=_options.flag("use_ema", use_ema),
            ema_momentum=_options.fraction("ema_momentum", ema_momentum),
            name=name,
            **{
                key: None if value is None else _options.number(key, value, above=0)
                for key, value in clips.items()
            },
            **{
                key: None
                if value is None
                else _options.integer(key, value, at_least=low)
                for key, (value, low) in counts.items()
            },
        )
        self.exclude = _exclusions.check_exclude(exclude)

    def build(self, variables: list[Any]) -> None:
        """Finds the variables that are excluded."""
        if self.built:
            return
        super().build(variables)
        found = _exclusions.are_excluded(variables, self.exclude)
        self._excluded = frozenset(
            self._var_key(v) for v, out in zip(variables, found, strict=True) if out
        )

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables with one gradient for each variable."""
        # Convert before clipping, because sparse gradients may have duplicate rows.
        dense = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in grads
        ]
        super().apply(dense, trainable_variables)

    def _decay_of(self, variable: Any) -> float:
        # The second condition implements Keras's exclude_from_weight_decay().
        if self._is_excluded(variable) or not self._use_weight_decay(variable):
            return 0.0
        return self.weight_decay or 0.0

    def _is_excluded(self, variable: Any) -> bool:
        return self._var_key(variable) in self._excluded

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing, because `update_step` includes the weight decay."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        exclude = _exclusions.serialize(self.exclude)
        return {**super().get_config(), "exclude": exclude}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> OptimizerWithExclusions:
        """Creates an optimizer, without state, from the result of `get_config`."""
        exclude = _exclusions.deserialize(config.get("exclude"), custom_objects)
        return super().from_config({**config, "exclude": exclude}, custom_objects)


def wide_dtype(variable: Any) -> tf.DType:
    """Returns the dtype in which a variable's update is computed."""
    return tf.float64 if variable.dtype in ("float64", tf.float64) else tf.float32
