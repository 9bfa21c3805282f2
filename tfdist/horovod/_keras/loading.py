"""`load_model`: a saved model, whose optimizer reduces its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tfdist.horovod._keras.optimizer import distributed_optimizer
from tfdist.optimizer import is_distributed

_LEGACY = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
# What Keras 2 has saved of an optimizer and Keras 3 does not take.
_DROPPED = ("is_legacy_optimizer", "jit_compile", "decay")


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: str | None,
    legacy_opts: bool,
) -> keras.Model:
    """Loads a model with all its state, and wraps its optimizer in place.

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: classes of optimizers that are not Keras's.
        custom_objects: names of other classes and functions of the model.
        compression: as of `tfdist.DistributedOptimizer`.
        legacy_opts: whether the file names an optimizer of
            `tf.keras.optimizers.legacy`.

    Returns:
        The model. One that was saved without an optimizer has none.

    Raises:
        ValueError: the optimizer accumulates batches, or had a `decay`.
    """
    objects: dict[str, Any] = {}
    if legacy_opts:
        objects.update({name: _from_legacy(name) for name in _LEGACY})
    for cls in custom_optimizers or ():
        objects[cls.__name__] = cls
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or is_distributed(optimizer):
        return model
    _check_accumulates_nothing(optimizer, filepath)
    wrapped = distributed_optimizer(optimizer, compression=compression)
    if wrapped is not optimizer:  # a loss scale was put around it
        model.optimizer = wrapped
    return model


def _check_accumulates_nothing(optimizer: Any, filepath: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            f"The optimizer of {filepath} adds up {steps} batches, and whether their "
            "sum or their mean is applied is not in the file. Write model = "
            "keras.models.load_model(...); model.optimizer = hvd.DistributedOptimizer("
            f"model.optimizer, backward_passes_per_step={steps}, "
            "average_aggregated_gradients=...)."
        )


def _from_legacy(name: str) -> type:
    """A class that makes Keras 3's optimizer from what Keras 2's has saved."""

    class Legacy(getattr(keras.optimizers, name)):  # type: ignore[misc]
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            if config.get("decay"):
                raise ValueError(
                    f"The saved {name} has decay={config['decay']}, which Keras 3 does "
                    "not know. Load with compile=False and compile with "
                    "learning_rate=keras.optimizers.schedules.InverseTimeDecay("
                    f"rate, 1, {config['decay']})."
                )
            kept = {k: v for k, v in config.items() if k not in _DROPPED}
            return getattr(keras.optimizers, name).from_config(kept)

    return Legacy
