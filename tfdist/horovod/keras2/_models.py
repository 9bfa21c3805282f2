"""Keras 2 models: arguments of `compile` and `fit`, generators, `.h5` weight files."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import keras

from tfdist.horovod.keras2._removed_arguments import MODEL, translated
from tfdist.horovod.keras2._spelling import Patches, refuse, tell

# Arguments for reading generators; in Keras 3 they are arguments of PyDataset.
_READING = ("max_queue_size", "workers", "use_multiprocessing")
_WEIGHTS = ".weights.h5"
_HDF5 = (".h5", ".hdf5")


def install(patches: Patches) -> None:
    """Patches `keras.Model` and `ModelCheckpoint`."""
    for name in MODEL:
        _wrap(patches, name, _dropping(name))
    for name in ("train_on_batch", "test_on_batch"):
        _wrap(patches, name, _on_batch)
    for name in ("fit", "evaluate", "predict"):
        _wrap(patches, name, _reads)
        patches.put(keras.Model, f"{name}_generator", _from_generator(name))
    _wrap(patches, "save_weights", _save_weights)
    patches.wrap(keras.callbacks.ModelCheckpoint, "__init__", _checkpoint)


def _wrap(patches: Patches, name: str, make: Callable[[Any], Any]) -> None:
    """Wraps a method in the class that defines it.

    Keras would take a wrapper in `keras.Model` for a custom `compile`.
    """
    owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
    patches.wrap(owner, name, make)


def _dropping(name: str) -> Callable[..., Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **named: Any) -> Any:
            return original(self, *args, **translated(name, MODEL[name], named))

        return method

    return make


def _on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Implements `reset_metrics`.

    In Keras 3, `original` always resets the metrics, or, in some versions, never does.
    """

    @functools.wraps(original)
    def on_batch(
        self: Any, *args: Any, reset_metrics: bool = True, **named: Any
    ) -> Any:
        if reset_metrics:
            self.reset_metrics()
            return original(self, *args, **named)
        new = "a loop with metric.update_state"
        tell(f"{original.__name__}(reset_metrics=False)", new)
        vars(self)["reset_metrics"] = lambda: None  # replaces the method
        try:
            return original(self, *args, **named)
        finally:
            del vars(self)["reset_metrics"]

    return on_batch


def _reads(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    def read(self: Any, *args: Any, **named: Any) -> Any:
        for old in _READING:
            if old in named:
                del named[old]
                new = f"keras.utils.PyDataset({old}=...) for the data"
                tell(f"{name}({old}=...)", new)
        return original(self, *args, **named)

    return functools.wraps(original)(read)


def _from_generator(name: str) -> Callable[..., Any]:
    """Returns `fit_generator` or a similar method, which accepts `fit`'s arguments."""
    orders = {
        "fit": (
            *("steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
            *("validation_steps", "validation_freq", "class_weight", *_READING),
            *("shuffle", "initial_epoch"),
        ),
        "evaluate": ("steps", "callbacks", *_READING, "verbose"),
        "predict": ("steps", "callbacks", *_READING, "verbose"),
    }

    def from_generator(self: Any, generator: Any, *args: Any, **named: Any) -> Any:
        tell(f"model.{name}_generator(generator, ...)", f"model.{name}(generator, ...)")
        given = dict(zip(orders[name], args, strict=False))
        if twice := sorted(set(given) & set(named)):
            raise TypeError(f"{name}_generator() got {twice} twice.")
        if name != "fit":
            named.setdefault("verbose", given.pop("verbose", 0))
        return getattr(self, name)(generator, **given, **named)

    from_generator.__name__ = f"{name}_generator"
    return from_generator


def _save_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_weights(
        self: Any, filepath: Any, overwrite: bool = True, *args: Any, **named: Any
    ) -> Any:
        path = os.fspath(filepath)
        save_format = named.pop("save_format", None)
        if save_format not in (None, "h5", "keras") and not path.endswith(_HDF5):
            raise refuse(
                f"save_weights({path!r}, save_format={save_format!r})",
                f"Write save_weights({path + _WEIGHTS!r}).",
            )
        if path.endswith(_WEIGHTS) or not path.endswith(_HDF5):
            return original(self, filepath, overwrite, *args, **named)
        tell("save_weights('name.h5')", "save_weights('name.weights.h5')")
        return _write_hdf5(self, path, overwrite)

    return save_weights


def _write_hdf5(model: Any, path: str, overwrite: bool) -> None:
    """Writes the Keras 2 format, which `load_weights` reads in Keras 2 and Keras 3."""
    import h5py
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.utils import io_utils

    if os.path.exists(path) and not overwrite:
        if not io_utils.ask_to_proceed_with_overwrite(path):
            return
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)


def _checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, filepath: Any, *args: Any, **named: Any) -> None:  # noqa: N807
        period = named.pop("period", 1)
        if period != 1:
            raise refuse(
                f"ModelCheckpoint(period={period})",
                f"Write ModelCheckpoint(save_freq={period} * steps_per_epoch).",
            )
        if named.pop("options", None) is not None:
            raise refuse(
                "ModelCheckpoint(options=...)",
                "A checkpoint is one Keras file; these options were for TensorFlow's "
                "formats. Omit them.",
            )
        given = signature.bind(self, filepath, *args, **named).arguments
        path = os.fspath(filepath)
        weights = given.get("save_weights_only", False)
        known = (_WEIGHTS,) if weights else (".keras", ".h5")
        if path.endswith(known) or not path.endswith(_HDF5):
            original(self, filepath, *args, **named)
            return
        tell(
            f"ModelCheckpoint('name{os.path.splitext(path)[1]}'"
            + (", save_weights_only=True)" if weights else ")"),
            f"ModelCheckpoint('name{known[0]}'"
            + (", save_weights_only=True)" if weights else ")"),
        )
        original(self, path + known[0], *args, **named)
        self.filepath = path

    return __init__
