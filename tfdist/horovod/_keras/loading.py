"""`load_model`: loads a saved model with an optimizer that reduces its gradients."""

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
# Keras 3.15 writes these names to .h5 files, but cannot load them.
_SHORT_NAMES = {
    "mse": keras.losses.mean_squared_error,
    "mae": keras.losses.mean_absolute_error,
}
# Optimizers of `tf.keras.optimizers.legacy` save such a slot for all variables, then
# the second slot for all. Keras 3 saves both slots variable by variable.
_LEGACY_SLOTS = ("m", "accum_grad")
# Optimizer settings that Keras 2 saves and Keras 3 does not accept.
_DROPPED = ("is_legacy_optimizer", "jit_compile", "decay")


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a saved model, with an optimizer that reduces its gradients.

    The optimizer continues from its saved state. It suffices that one rank loads the
    file: `BroadcastGlobalVariablesCallback` sends the values to all ranks. A `.keras`
    file of a `Sequential` must be loaded by all ranks: the variables of the loaded
    model have different paths than those of a newly created model, and the ranks
    compare the paths.

    Args:
        filepath: path of a `.keras` or `.h5` file.
        custom_optimizers: custom optimizer classes that the file may contain.
        custom_objects: dictionary from the names of all other custom classes and
            functions of the model to the objects.
        compression: see `DistributedOptimizer`.
        legacy_opts: whether the model was saved with an optimizer of
            `tf.keras.optimizers.legacy` (Keras 2).

    Returns:
        The model. It has no optimizer if it was saved without one.

    Raises:
        ValueError: the file does not exist; the optimizer has a `decay`; or it
            accumulates gradients (the file does not state whether their sum or their
            mean is applied).
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
    """Returns the optimizer of a model loaded from an .h5 file, with its saved slots.

    Keras 3.15 builds the loaded optimizer without the variables of the layers. It has
    no slots for these variables and cannot take a step, so it is created again. Keras
    also loads the slots of a legacy optimizer in the wrong order.
    """
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    found: Any = model.optimizer
    variables = model.trainable_variables
    if not found.built:
        return found
    with h5py.File(path, "r") as file:
        names = legacy_h5_format.load_attributes_from_hdf5_group(
            file["optimizer_weights"], "weight_names"
        )
        ends = [name.rpartition("/")[2].partition(":")[0] for name in names]
        is_legacy = any(ends.count(slot) == len(variables) for slot in _LEGACY_SLOTS)
        if len(found._trainable_variables) == len(variables) and not is_legacy:
            return found
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        values = [value[()] for value in values]
    optimizer = type(found).from_config(found.get_config(), custom_objects=objects)
    optimizer.build(variables)
    own = list(optimizer.variables)
    if is_legacy or len(values) == len(own) - 1:  # Keras 2 did not save the rate
        own = [v for v in own if not v.path.endswith("learning_rate")]
    if is_legacy:
        slots = [v.path.rpartition("_")[2] for v in own]
        own.sort(key=lambda v: slots.index(v.path.rpartition("_")[2]))
    shapes = [tuple(v.shape) for v in own]
    if shapes == [value.shape for value in values]:
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)
    else:
        _logger.warning(
            "The optimizer state saved in %s does not match %s of Keras 3; the "
            "optimizer starts with a new state.",
            path,
            type(optimizer).__name__,
        )
    return optimizer


def _check_accumulates_nothing(optimizer: Any, filepath: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            f"The optimizer of {filepath} accumulates {steps} batches, but the file "
            "does not state whether their sum or their mean is applied. Write model = "
            "keras.models.load_model(...); model.optimizer = hvd.DistributedOptimizer("
            f"model.optimizer, backward_passes_per_step={steps}, "
            "average_aggregated_gradients=...)."
        )


@contextlib.contextmanager
def _legacy_configurations() -> Iterator[None]:
    """Makes Keras 3 accept optimizer configurations that Keras 2 has saved."""
    base = keras.optimizers.Optimizer
    original = base.from_config.__func__  # type: ignore[attr-defined]

    def from_config(cls: Any, config: dict[str, Any], *args: Any, **named: Any) -> Any:
        if config.get("decay"):
            raise ValueError(
                f"The saved {cls.__name__} has decay={config['decay']}, which Keras 3 "
                "does not support. Load the model with keras.models.load_model(path, "
                "compile=False), and compile it with "
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
