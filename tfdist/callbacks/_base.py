"""What all callbacks share: the checks that gradients are really reduced."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import _core, _runtime, split_step
from tfdist.callbacks._saving import guard_saving
from tfdist.optimizer import is_distributed, unwrapped_message


class RankCallback(keras.callbacks.Callback):
    """A callback of a model that is trained on several ranks.

    Before the first step it refuses a model whose gradients would not be reduced. After
    the first step it looks whether a reduction really took place, which is all that can
    be said about a custom `train_step`. Of a model with `jit_compile=True` XLA compiles
    the forward and backward pass, not the reduction and the update.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checked = False
        self._finished_before = 0
        self._steps_seen = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model."""
        _runtime.check_initialized()
        check_model(self.model)
        guard_saving(self.model)
        split_step.install(self.model)
        self._checked = False
        self._steps_seen = 0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the model back as it was."""
        split_step.remove(self.model)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Before the first step: notes what the engine has done so far."""
        if self._steps_seen == 0:
            self._finished_before = finished_operations()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """After the first update: checks that gradients were reduced."""
        if self._checked:
            return
        self._steps_seen += 1
        if self._steps_seen < _steps_with_an_update(self.model):
            return
        self._checked = True
        if _runtime.size() > 1 and finished_operations() == self._finished_before:
            raise RuntimeError(
                "The first step reduced no gradients: every rank trains on its own. "
                "A custom train_step has to call self.optimizer.apply(gradients, "
                "variables) with a tfdist.DistributedOptimizer, or take its "
                "gradients from a tfdist.DistributedGradientTape."
            )


def finished_operations() -> int:
    """How many operations the engine has finished in this world."""
    return int(_core.counters()["finished"])


def _steps_with_an_update(model: keras.Model) -> int:
    """How many steps there are at most until the weights change."""
    return getattr(base_optimizer(model), "gradient_accumulation_steps", None) or 1


def check_model(model: keras.Model) -> None:
    """Raises if `model` cannot be trained on several ranks as it is compiled.

    Raises:
        ValueError: the optimizer does not reduce, or reduces inside a loss scale.
    """
    optimizer = model.optimizer
    if is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError(
            "The model's optimizer is a LossScaleOptimizer around a tfdist optimizer. "
            "The reduction has to be outside: write tfdist.DistributedOptimizer("
            "keras.optimizers.LossScaleOptimizer(optimizer))."
        )
    # A train_step of the user's own may reduce with a tape; only the first step shows.
    uses_keras_step = type(model).train_step is keras.Model.train_step
    if not is_distributed(optimizer) and uses_keras_step:
        raise ValueError(unwrapped_message(optimizer))


def base_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer that has the learning rate: the inner one of a loss scale."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)
