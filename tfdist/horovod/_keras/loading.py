"""`load_model`: a saved model, whose optimizer reduces its gradients."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist.horovod._keras.optimizer import DistributedOptimizer
from tfdist.horovod.tensorflow.compression import Compression
from tfdist.training.optimizer import is_distributed

_logger = logging.getLogger("tfdist")
# Keras 3.15 writes these names into .h5 files, and does not find them again.
_SHORT_NAMES = {
    "mse": keras.losses.mean_squared_error,
    "mae": keras.losses.mean_absolute_error,
}
# What Keras 2 has saved of an optimizer and Keras 3 does not take.
_DROPPED = ("is_legacy_optimizer", "jit_compile", "decay")


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a saved model, with an optimizer that reduces its gradients.

    The optimizer goes on with the state that was saved. One rank or all may read the
    file; `BroadcastGlobalVariablesCallback` sends what one has read. (All have to, if
    it is the `.keras` file of a `Sequential`: Keras gives its variables other paths
    than those of a new one, and the ranks compare them.)

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: optimizer classes that are not Keras's.
        custom_objects: names of other classes and functions of the model.
        compression: as of `DistributedOptimizer`.
        legacy_opts: whether the file names an optimizer of
            `tf.keras.optimizers.legacy` (Keras 2).

    Returns:
        The model; without an optimizer, if it was saved without.

    Raises:
        ValueError: no such file, or the optimizer adds up batches: whether their sum
            or mean is applied is not in the file; or it had a `decay`.
    """
    is_hdf5 = str(filepath).endswith((".h5", ".hdf5"))
    objects: dict[str, Any] = dict(_SHORT_NAMES) if is_hdf5 else {}
    for cls in custom_optimizers or ():
        objects[cls.__name__] = cls
    objects.update(custom_objects or {})
    with _legacy_configurations() if legacy_opts else contextlib.nullcontext():
        model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or is_distributed(optimizer):
        return model
    _check_accumulates_nothing(optimizer, filepath)
    if is_hdf5:
        optimizer = _with_state(model, str(filepath), objects)
    wrapped = DistributedOptimizer(optimizer, compression=compression)
    if wrapped is not model.optimizer:
        model.optimizer = wrapped
    return model


def _with_state(model: keras.Model, path: str, objects: dict[str, Any]) -> Any:
    """The optimizer of a model from an .h5 file, with the slots that are in it.

    Keras 3.15 builds it without the variables of the layers, so that it neither gets
    its slots nor can take a step.
    """
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    found: Any = model.optimizer
    variables = model.trainable_variables
    if not found.built or len(found._trainable_variables) == len(variables):
        return found
    optimizer = type(found).from_config(found.get_config(), custom_objects=objects)
    optimizer.build(variables)
    with h5py.File(path, "r") as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        values = [value[()] for value in values]
    own = list(optimizer.variables)
    if len(values) == len(own) - 1:  # Keras 2 did not save the rate
        own = [v for v in own if not v.path.endswith("learning_rate")]
    shapes = [tuple(v.shape) for v in own]
    if shapes == [value.shape for value in values]:
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)
    else:
        _logger.warning(
            "The state of the optimizer in %s does not fit %s of Keras 3: it begins "
            "anew.",
            path,
            type(optimizer).__name__,
        )
    return optimizer


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


@contextlib.contextmanager
def _legacy_configurations() -> Iterator[None]:
    """Inside, Keras 3 makes its optimizers from what those of Keras 2 have saved."""
    base = keras.optimizers.Optimizer
    original = base.from_config.__func__  # type: ignore[attr-defined]

    def from_config(cls: Any, config: dict[str, Any], *args: Any, **named: Any) -> Any:
        if config.get("decay"):
            raise ValueError(
                f"The saved {cls.__name__} has decay={config['decay']}, which Keras 3 "
                "does not know. Load with compile=False and compile with "
                "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, "
                f"{config['decay']})."
            )
        kept = {k: v for k, v in config.items() if k not in _DROPPED}
        return original(cls, kept, *args, **named)

    base.from_config = classmethod(from_config)  # type: ignore[assignment]
    try:
        yield
    finally:
        del base.from_config
