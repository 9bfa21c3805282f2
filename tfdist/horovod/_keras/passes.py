"""Horovod's `backward_passes_per_step`, with Keras's gradient accumulation.

Keras's optimizers accumulate gradients (`gradient_accumulation_steps`), and tfdist
reduces them once for each update. Horovod differs in two ways:

- Keras divides the sum of the gradients by the number of batches. Horovod applies the
  sum, unless `average_aggregated_gradients` is set.
- In Keras `iterations` counts updates; in Horovod it counts batches. Adam's bias
  correction depends on `iterations` (learning rate schedules count batches in both).
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.core.keras_subclass import subclass_under_own_name
from tfdist.training.optimizer_mixins import ReducesUpdates


class CountsPasses:
    """Mixin for an accumulating optimizer whose `iterations` counts batches."""

    _iterations: Any

    @property
    def iterations(self) -> Any:
        """The number of batches so far, as in Horovod's optimizers."""
        return self._iterations


class SumsPasses(CountsPasses):
    """Mixin for an accumulating optimizer that applies the sum instead of the mean.

    The sum is the one that Keras computes before the division. The mean times the
    number of batches would have different rounding errors.
    """

    # Methods of the optimizer's own class.
    _accumulated_gradients: list[Any]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Bypasses Keras's __setattr__, which would track the variables.
        vars(self)["_tfdist_pass"] = list(grads), list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Replaces the means with sums, once per update, before the reduction."""
        if vars(self).get("_tfdist_own_weight") is not None:
            raise ValueError(
                "apply() was given a weight, but with backward_passes_per_step the "
                "gradients are added up. Write average_aggregated_gradients=True, or "
                "omit the weight."
            )
        own, variables = vars(self)["_tfdist_pass"]
        summed = [
            g + self._accumulated_gradients[self._get_variable_index(v)]  # type: ignore[attr-defined]
            for g, v in zip(own, variables, strict=True)
        ]
        return super()._clip_gradients(summed)  # type: ignore[misc]


def check_passes(optimizer: Any, passes: int) -> None:
    """Raises if an optimizer cannot accumulate this number of batches.

    Args:
        optimizer: the optimizer that updates the variables: for a `LossScaleOptimizer`,
            its inner optimizer.
        passes: number of batches per update.

    Raises:
        TypeError: `passes` is not an integer.
        ValueError: `passes` is below 1; or the optimizer accumulates a different
            number, is a `MultiOptimizer`, is already built without accumulators, or has
            a class that overrides `apply_gradients`.
    """
    if isinstance(passes, bool) or not hasattr(passes, "__index__"):
        raise TypeError(
            f"Expected backward_passes_per_step to be an integer, got {passes!r}."
        )
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be > 0, got {passes}.")
    if passes == 1:
        return
    if hasattr(optimizer, "_inner_optimizers"):
        raise ValueError(
            "backward_passes_per_step cannot be used with a MultiOptimizer. Set "
            "gradient_accumulation_steps on each of its optimizers."
        )
    of_keras = keras.optimizers.Optimizer.apply_gradients
    is_wrapped = isinstance(optimizer, ReducesUpdates)  # the wrapper raises the error
    if not is_wrapped and type(optimizer).apply_gradients is not of_keras:
        raise ValueError(
            f"The class of the optimizer {optimizer.name!r} overrides apply_gradients, "
            "which Horovod calls once for each update, but Keras once for each batch: "
            "backward_passes_per_step cannot be used with this class. Move the code "
            "to update_step, or omit backward_passes_per_step."
        )
    own = optimizer.gradient_accumulation_steps
    if own not in (None, passes):
        raise ValueError(
            f"Expected backward_passes_per_step={own}, which the optimizer "
            f"{optimizer.name!r} has as gradient_accumulation_steps, got {passes}. "
            "Omit one of them."
        )
    if own is None and optimizer.built:
        raise ValueError(
            f"The optimizer {optimizer.name!r} is already built, without accumulators "
            f"for {passes} batches. Wrap it before it is built, or create it with "
            f"gradient_accumulation_steps={passes}."
        )


def put_before(optimizer: Any, mixin: Any) -> None:
    """Replaces an optimizer's class with a subclass in which `mixin` comes first."""
    cls = type(optimizer)
    kind = keras.optimizers.Optimizer
    plain = next(
        c
        for c in cls.__mro__
        if issubclass(c, kind) and not issubclass(c, ReducesUpdates)
    )
    optimizer.__class__ = subclass_under_own_name(cls, mixin, keras.optimizers, {})
    package, separator, name = keras.saving.get_registered_name(plain).partition(">")
    if separator:  # a saved model must load as the plain class
        keras.saving.register_keras_serializable(package, name)(plain)
