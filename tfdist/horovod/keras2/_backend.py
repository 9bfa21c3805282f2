"""Keras 2 functions of `keras.backend`: values of variables, and sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.horovod.keras2._spelling import Patches, refuse, tell


def install(patches: Patches) -> None:
    """Patches `keras.backend` and `tf.keras.backend`, and adds two names to `tf`."""
    from keras._tf_keras.keras import backend as of_tf_keras

    for module in (keras.backend, of_tf_keras):
        patches.put(module, "get_value", _get_value)
        patches.put(module, "set_value", _set_value)
        patches.put(module, "set_session", _set_session)
        patches.put(module, "get_session", _get_session)
    for name in ("ConfigProto", "Session"):
        if not hasattr(tf, name):
            patches.put(tf, name, _from_v1(name))


def _get_value(x: Any) -> Any:
    """Returns a variable's value as a NumPy array."""
    tell("keras.backend.get_value(v)", "v.numpy()")
    if hasattr(x, "numpy"):
        return x.numpy()
    return keras.ops.convert_to_numpy(x) if tf.is_tensor(x) else x


def _set_value(x: Any, value: Any) -> None:
    """Sets a variable's value."""
    tell("keras.backend.set_value(v, x)", "v.assign(x)")
    if not hasattr(x, "assign"):
        raise TypeError(
            "Expected a variable for keras.backend.set_value, got "
            f"{type(x).__name__}: {x!r}."
        )
    x.assign(np.asarray(value, dtype=tf.as_dtype(x.dtype).as_numpy_dtype))


def _set_session(session: Any) -> None:
    """Applies a session's GPU configuration to this process."""
    new = "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')"
    tell("keras.backend.set_session(session)", new)
    config = getattr(session, "_config", None)
    if config is None:
        return
    options = config.gpu_options
    if options.per_process_gpu_memory_fraction:
        raise refuse(
            "gpu_options.per_process_gpu_memory_fraction",
            "Write tf.config.set_logical_device_configuration(gpu, "
            "[tf.config.LogicalDeviceConfiguration(memory_limit=MiB)]).",
        )
    gpus = tf.config.list_physical_devices("GPU")
    if options.visible_device_list and gpus:
        gpus = [gpus[int(one)] for one in options.visible_device_list.split(",")]
        tf.config.set_visible_devices(gpus, "GPU")
    if options.allow_growth:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)


def _get_session() -> Any:
    raise refuse(
        "keras.backend.get_session()",
        "There is no session: tensors and variables have values immediately "
        "(v.numpy()), and hvd's functions return values.",
    )


def _from_v1(name: str) -> Callable[..., Any]:
    def make(*args: Any, **named: Any) -> Any:
        tell(f"tf.{name}", f"tf.compat.v1.{name}, or tf.config for GPUs")
        return getattr(tf.compat.v1, name)(*args, **named)

    make.__name__ = name
    return make
