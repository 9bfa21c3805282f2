"""Mixin for `double_buffering=True`: updates with the gradients of the previous step.

See `tfdist.gradients.double_buffer` for the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.gradients import reduction
from tfdist.gradients.double_buffer import DoubleBuffer, buffer_of, clear_buffers
from tfdist.training.optimizer_mixins import Reducing, identities


class ReducingPrevious(Reducing):
    """Mixin for an optimizer that reduces the gradients of the previous step."""

    def reduce_for_update(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Stores the gradients; returns the reduced gradients of the previous step."""
        _check_supported(self)
        return reduction.reduce_gradients(
            grads,
            variables,
            self.tfdist_options,
            weight=weight,
            buffer=self._buffer_of(variables),
        )

    def _to_accumulate(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        _check_supported(self)  # raises: accumulation is not supported
        return super()._to_accumulate(grads, variables, weight)

    def _update_if_finite(
        self, update: Callable[..., Any], grads: list[Any], variables: list[Any]
    ) -> Any:
        self._build_outside_of_branches(variables)
        update_if_finite = super()._update_if_finite

        def take() -> tf.Tensor:
            update_if_finite(update, identities(grads), variables)
            return tf.constant(True)

        was_full = self._buffer_of(variables).was_full
        return tf.cond(was_full, take, lambda: tf.constant(False))

    def load_own_variables(self, store: Any) -> None:
        """Loads the state; drops buffered gradients, which belong to the old state."""
        super().load_own_variables(store)
        clear_buffers(self._trainable_variables)

    def _buffer_of(self, variables: list[Any]) -> DoubleBuffer:
        buffer: Any = buffer_of(variables, self.tfdist_options, self)
        return buffer  # type: ignore[no-any-return]


def check_wrappable(optimizer: Any) -> None:
    """Raises ValueError if an optimizer cannot be used with `double_buffering=True`.

    Args:
        optimizer: a Keras optimizer, which is not wrapped yet.
    """
    if keras.config.dtype_policy().name == "mixed_float16" or isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        raise ValueError(
            "double_buffering=True cannot be used with a LossScaleOptimizer "
            "(mixed_float16 adds one): the gradients of a step would be unscaled with "
            "the scale of the next one. Use the policy mixed_bfloat16, or omit "
            "double_buffering."
        )
    _check_supported(optimizer)


def _check_supported(optimizer: Any) -> None:
    for one in getattr(optimizer, "_inner_optimizers", [optimizer]):
        if one.gradient_accumulation_steps:
            raise ValueError(
                "gradient_accumulation_steps cannot be used with double_buffering=True,"
                f" got {one.gradient_accumulation_steps!r} for {one.name!r}. Use only "
                "one of them."
            )
