"""Describes where a thread is in the user's words, from its Python stack.

A stack inside a collective holds frames of tfdist, Keras and TensorFlow. The user knows
what is outside of them: the function that was called, or the callback and the epoch,
and the line of the program.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

import tfdist

_HOOKS = {
    "on_train_begin": "at the start of fit",
    "on_train_end": "at the end of fit",
    "on_epoch_begin": "at the start of epoch {epoch}",
    "on_epoch_end": "at the end of epoch {epoch}",
    "on_train_batch_begin": "before step {step} of epoch {epoch}",
    "on_train_batch_end": "after step {step} of epoch {epoch}",
}
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")


def describe_call(frame: FrameType | None) -> str:
    """What the program called, and at which line, e.g. "tfdist.evaluate (train.py:9)".

    Args:
        frame: the innermost frame of the thread.

    Returns:
        "" where neither tfdist nor a loop of Keras has been called.
    """
    segment, caller = _split(frame)
    name = ""
    for inner in segment:  # the outermost one counts
        name = _name_of(inner, segment) or name
    if not name and segment and caller is not None and _is_graph_call(segment[0]):
        name = "a tf.function"
    return f"{name}{_line_of(caller)}" if name else ""


def _split(frame: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
    """The frames outside of the user's program, innermost first; then the user's."""
    segment: list[FrameType] = []
    for one in _outwards(frame):
        if _owner(one) == "user":
            return segment, one
        segment.append(one)
    return segment, None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name_of(frame: FrameType, segment: list[FrameType]) -> str:
    """What the user calls the function of a frame; "" if it is none of interest."""
    owner = _owner(frame)
    function = frame.f_code.co_name
    own = frame.f_locals.get("self") if owner in ("tfdist", "keras") else None
    if owner == "keras":
        if function in _LOOPS and isinstance(own, keras.Model):
            return _name_of_loop(frame, segment)
        return ""
    if owner != "tfdist" or function.startswith(("_", "<")):
        return ""
    if isinstance(own, keras.callbacks.Callback):
        # Of its hooks those of `fit` are described there; here they are called alone.
        return f"{name_of_callback(own)}.{function}"
    if own is not None:
        return f"{type(own).__name__}.{function}" if _is_public(type(own)) else ""
    return f"tfdist.{function}" if hasattr(tfdist, function) else ""


def _name_of_loop(frame: FrameType, segment: list[FrameType]) -> str:
    """The callback and its hook, or the step of `fit`."""
    function = frame.f_code.co_name
    variables = frame.f_locals
    counts = {
        "epoch": _plus_one(variables.get("epoch")),
        "step": _plus_one(variables.get("begin_step", variables.get("step"))),
    }
    for inner in segment:
        hook = inner.f_code.co_name
        own = inner.f_locals.get("self") if hook.startswith("on_") else None
        if inner is frame:
            break
        if isinstance(own, keras.callbacks.Callback):
            when = _HOOKS.get(hook, f"in {hook}").format(**counts)
            return f"{name_of_callback(own)} {when}"
    if function == "fit":
        if "epoch" not in variables:
            return "the start of model.fit"
        return "step {step} of epoch {epoch} of model.fit".format(**counts)
    return f"model.{function}"


def name_of_callback(callback: keras.callbacks.Callback) -> str:
    """The class, and the one that it wraps: "RankZeroOnly(CSVLogger)"."""
    inner = getattr(callback, "callback", None)
    name = type(callback).__name__
    return f"{name}({type(inner).__name__})" if inner is not None else name


def _plus_one(index: Any) -> Any:
    return index + 1 if isinstance(index, int) else "?"


def _is_public(cls: type) -> bool:
    return not cls.__name__.startswith("_")


def _is_graph_call(frame: FrameType) -> bool:
    return _owner(frame) == "tensorflow"


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _owner(frame: FrameType) -> str:
    """Whose code it is: "tfdist", "keras", "tensorflow", "python" or "user"."""
    filename = frame.f_code.co_filename
    if filename == "<string>" and frame.f_code.co_name.startswith("tfdist_"):
        return "tfdist"  # a function that TensorFlow has made for an operation
    return _owner_of_file(filename)


@functools.lru_cache(maxsize=4096)
def _owner_of_file(filename: str) -> str:
    for owner, folder in _FOLDERS.items():
        if filename.startswith(folder + os.sep):
            return owner
    inside = filename.startswith((_PYTHON + os.sep, "<frozen"))
    return "python" if inside and "site-packages" not in filename else "user"


def _folder_of(module: Any) -> str:
    return os.path.dirname(os.path.abspath(module.__file__))


# Packages that pip installs are inside of Python's folder: these come first.
_FOLDERS = {
    "tfdist": _folder_of(tfdist),
    "keras": _folder_of(keras),
    "tensorflow": _folder_of(tf),
}
_PYTHON = sysconfig.get_paths()["stdlib"]
