"""Describes where a thread is in the user's program, from its Python stack.

A stack inside a collective holds frames of tfdist, Keras and TensorFlow. The user knows
the outer frames: the function that was called, or the callback and the epoch, and the
line of the program. This module imports neither Keras nor TensorFlow, because a program
need not use them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

_HOOKS = {
    "on_train_begin": "at the start of fit",
    "on_train_end": "at the end of fit, after epoch {epoch}",
    "on_epoch_begin": "at the start of epoch {epoch}",
    "on_epoch_end": "at the end of epoch {epoch}",
    "on_train_batch_begin": "before step {step} of epoch {epoch}",
    "on_train_batch_end": "after step {step} of epoch {epoch}",
}
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")
_PACKAGES = ("tfdist", "keras", "tensorflow")
# Functions that run code on one rank. Their variable `place` is the name of the code.
# If they have a variable `works`, it is true while this rank runs the code.
_RUN_ON_RANK = ("run_on_rank", "_alone")


def describe_call(frame: FrameType | None) -> str:
    """Returns the program's call and its line, e.g. "tfdist.evaluate (train.py:9)".

    Args:
        frame: the innermost frame of the thread.

    Returns:
        The description, or "" if the thread is in neither tfdist, a loop of Keras nor a
        `tf.function`.
    """
    segment, caller = split_stack(frame)
    name = ""
    for inner in segment:  # the outermost name is used
        name = _name_of(inner, segment) or name
    if not name and segment and owner_of(segment[0]) == "tensorflow":
        name = "a tf.function"
    return f"{name}{_line_of(caller)}" if name else ""


def describe_place(frame: FrameType | None) -> str:
    """Returns `describe_call`'s text, and names any code that only this rank runs."""
    called = describe_call(frame)
    for one in outwards(frame):
        if one.f_code.co_name in _RUN_ON_RANK and owner_of(one) == "tfdist":
            if one.f_locals.get("works", True):
                place = one.f_locals.get("place")
                return f"{called} inside {place}, which only this rank runs,"
    return called


def split_stack(
    frame: FrameType | None,
) -> tuple[list[FrameType], FrameType | None]:
    """Returns the library frames, innermost first, and the user frame that called."""
    segment: list[FrameType] = []
    for one in outwards(frame):
        if owner_of(one) == "user":
            return segment, one
        segment.append(one)
    return segment, None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def owner_of(frame: FrameType) -> str:
    """Returns "tfdist", "keras", "tensorflow", "python" or "user"."""
    filename = frame.f_code.co_filename
    if filename == "<string>" and frame.f_code.co_name.startswith("tfdist_"):
        return "tfdist"  # a function that TensorFlow generated for an operation
    return _owner_of_file(filename)


def name_of_callback(callback: Any) -> str:
    """Returns the class name, with any wrapped class: "RankZeroOnly(CSVLogger)"."""
    inner = getattr(callback, "callback", None)
    name = str(getattr(callback, "described_as", type(callback).__name__))
    return f"{name}({type(inner).__name__})" if inner is not None else name


def _name_of(frame: FrameType, segment: list[FrameType]) -> str:
    """Returns the public name of a frame's function; "" if it is not public."""
    owner = owner_of(frame)
    function = frame.f_code.co_name
    own = frame.f_locals.get("self") if owner in ("tfdist", "keras") else None
    if owner == "keras":
        if function in _LOOPS and _is_model(own):
            return _name_of_loop(frame, segment)
        return ""
    if owner != "tfdist" or function.startswith(("_", "<")):
        return ""
    if _is_callback(own):  # outside `fit`, whose hooks are described separately
        return f"{name_of_callback(own)}.{function}"
    if own is not None:
        of_ours = type(own).__module__.startswith("tfdist.")  # not a wrapped class
        is_public = of_ours and not type(own).__name__.startswith("_")
        return f"{type(own).__name__}.{function}" if is_public else ""
    public = sys.modules["tfdist"].__all__  # this module belongs to tfdist
    return f"tfdist.{function}" if function in public else ""


def _name_of_loop(frame: FrameType, segment: list[FrameType]) -> str:
    """Returns the callback and its hook, or the step of `fit`."""
    function = frame.f_code.co_name
    variables = frame.f_locals
    counts = {
        "epoch": _plus_one(variables.get("epoch")),
        "step": _plus_one(variables.get("begin_step", variables.get("step"))),
    }
    for inner in segment:
        if inner is frame:
            break
        hook = inner.f_code.co_name
        own = inner.f_locals.get("self") if hook.startswith("on_") else None
        if _is_callback(own) and type(own).__name__ != "CallbackList":
            when = _HOOKS.get(hook, f"in {hook}").format(**counts)
            return f"{name_of_callback(own)} {when}"
    if function != "fit":
        return f"model.{function}"
    if "epoch" not in variables:
        return "the start of model.fit"
    return "step {step} of epoch {epoch} of model.fit".format(**counts)


def _is_callback(own: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(own, keras.callbacks.Callback)


def _is_model(own: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(own, keras.Model)


def _plus_one(index: Any) -> Any:
    return index + 1 if isinstance(index, int) else "?"


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


@functools.lru_cache(maxsize=4096)
def _owner_of_file(filename: str) -> str:
    for owner, folder in _folders().items():
        if filename.startswith(folder + os.sep):
            return owner
    inside = filename.startswith((sysconfig.get_paths()["stdlib"] + os.sep, "<frozen"))
    return "python" if inside and "site-packages" not in filename else "user"


@functools.cache
def _folders() -> dict[str, str]:
    """Returns the folder of each package; pip installs them inside Python's folder."""
    specs = ((name, importlib.util.find_spec(name)) for name in _PACKAGES)
    return {
        name: os.path.dirname(spec.origin)
        for name, spec in specs
        if spec is not None and spec.origin is not None
    }
