"""`backward_passes_per_step`: Horovod's accumulation of gradients, over Keras's.

Keras's optimizers accumulate (`gradient_accumulation_steps`), and tfdist reduces once
for each update. Two things differ from Horovod:

- Keras divides by the number of batches. Horovod adds the batches up, unless
  `average_aggregated_gradients`.
- Keras's `iterations` counts updates, Horovod's counts batches. Adam's correction of
  its moments follows from it (a schedule sees batches under both).
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.core.keras_subclass import subclass_under_own_name
from tfdist.training.optimizer_mixins import ReducesUpdates


class CountsPasses:
    """Mixin of an optimizer that accumulates: `iterations` counts batches."""

    _iterations: Any

    @property
    def iterations(self) -> Any:
        """Number of batches so far, as Horovod's optimizers count."""
        return self._iterations


class SumsPasses(CountsPasses):
    """Mixin of an optimizer that accumulates: a sum in place of the mean.

    The sum is the one that Keras has in hand before it divides, not the mean times the
    number: so its bits are those of adding up.
    """

    # Of the optimizer's own class.
    _accumulated_gradients: list[Any]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Past Keras's __setattr__, which would take them for the optimizer's own.
        vars(self)["_tfdist_pass"] = list(grads), list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Comes once for each update, with the means, before they are reduced."""
        if vars(self).get("_tfdist_own_weight") is not None:
            raise ValueError(
                "apply() was given a weight, but with backward_passes_per_step the "
                "gradients are added up. Write average_aggregated_gradients=True, or "
                "leave the weight out."
            )
        own, variables = vars(self)["_tfdist_pass"]
        summed = [
            g + self._accumulated_gradients[self._get_variable_index(v)]  # type: ignore[attr-defined]
            for g, v in zip(own, variables, strict=True)
        ]
        return super()._clip_gradients(summed)  # type: ignore[misc]


def check_passes(optimizer: Any, passes: int) -> None:
    """Raises if an optimizer cannot accumulate so many batches.

    Args:
        optimizer: the one that makes the updates (inside of a loss scale).
        passes: batches for each update.

    Raises:
        TypeError: `passes` is no integer.
        ValueError: it is below 1, or the optimizer accumulates another number, or is
            one of several, or is built without accumulators, or its class has an
            `apply_gradients` of its own.
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
            "backward_passes_per_step cannot be used with a MultiOptimizer. Give each "
            "of its optimizers gradient_accumulation_steps."
        )
    of_keras = keras.optimizers.Optimizer.apply_gradients
    is_wrapped = isinstance(optimizer, ReducesUpdates)  # refused by whoever wraps
    if not is_wrapped and type(optimizer).apply_gradients is not of_keras:
        raise ValueError(
            f"The class of the optimizer {optimizer.name!r} has an apply_gradients of "
            "its own, which Horovod calls once for each update, but Keras once for "
            "each batch: backward_passes_per_step cannot be used with it. Put what it "
            "does into update_step, or leave backward_passes_per_step out."
        )
    own = optimizer.gradient_accumulation_steps
    if own not in (None, passes):
        raise ValueError(
            f"Expected backward_passes_per_step={own}, which the optimizer "
            f"{optimizer.name!r} has as gradient_accumulation_steps, got {passes}. "
            "Leave one of them out."
        )
    if own is None and optimizer.built:
        raise ValueError(
            f"The optimizer {optimizer.name!r} is built, without room for the sum of "
            f"{passes} batches. Wrap it before it is built, or make it with "
            f"gradient_accumulation_steps={passes}."
        )


def accumulate(optimizer: Any, passes: int, average: bool) -> None:
    """Lets a reducing optimizer add up batches in Horovod's way.

    Args:
        optimizer: the one that makes the updates, a class of tfdist's already.
        passes: batches for each update, above 1.
        average: whether the mean is applied, else the sum.
    """
    optimizer.gradient_accumulation_steps = passes
    put_before(optimizer, CountsPasses if average else SumsPasses)


def put_before(optimizer: Any, mixin: Any) -> None:
    """Gives a reducing optimizer a class with the methods of `mixin` before its own."""
    cls = type(optimizer)
    kind = keras.optimizers.Optimizer
    plain = next(
        c
        for c in cls.__mro__
        if issubclass(c, kind) and not issubclass(c, ReducesUpdates)
    )
    optimizer.__class__ = subclass_under_own_name(cls, mixin, keras.optimizers, {})
    package, separator, name = keras.saving.get_registered_name(plain).partition(">")
    if separator:  # that name is to be loaded as the plain class
        keras.saving.register_keras_serializable(package, name)(plain)
