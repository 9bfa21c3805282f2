"""Finds the list that contains a callback, and compares the lists of all ranks.

In Keras, a callback has no access to other callbacks. But hooks are called from a
method of `keras.callbacks.CallbackList`, so the list is found in the call stack.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import keras

from tfdist import errors
from tfdist.callbacks._list_rules import EVERYWHERE, WRITES, Entry, find_problem
from tfdist.collectives.consistency.in_step import may_have_other_ranks
from tfdist.collectives.objects import gather_from_all
from tfdist.core.process_sets import ProcessSet

_KNOWN = (*EVERYWHERE, *WRITES, "BackupAndRestore", "History", "ProgbarLogger")
# The rules apply to classes in these modules, and to subclasses with Horovod's names.
_OURS = "tfdist.callbacks."
_PLAIN = (bool, int, float, str, type(None))


def callback_list_of_the_call() -> keras.callbacks.CallbackList | None:
    """Returns the callback list whose `on_train_begin` is running, or None."""
    code = keras.callbacks.CallbackList.on_train_begin.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]


class ReplacedHook:
    """A replacement for a method of a callback list, such as `on_epoch_begin`.

    Args:
        hook: name of the method and of the hook.
        call: function that is called instead, with the name, the positional arguments
            of the hook except the logs, and the logs or None.
    """

    def __init__(
        self, hook: str, call: Callable[[str, tuple[Any, ...], Any], None]
    ) -> None:
        self._hook = hook
        self._call = call

    def __call__(self, *arguments: Any, logs: Any = None) -> None:
        """Calls the function, with the arguments of `keras.callbacks.CallbackList`."""
        count = 0 if self._hook == "on_train_end" else 1
        given = arguments[count] if len(arguments) > count else logs
        self._call(self._hook, arguments[:count], given)


def is_in_fit(model: keras.Model) -> bool:
    """Returns whether the `fit` of this model is running, rather than a custom loop."""
    return variables_of_fit(model) is not None


def leaves_out_validation(model: keras.Model, epoch: int) -> bool:
    """Returns whether the running `fit` skips the validation of an epoch.

    Args:
        model: the model in `fit`.
        epoch: indexed from 0.
    """
    found = variables_of_fit(model) or {}
    if found.get("validation_data") is None:
        return False
    how_often = found.get("validation_freq", 1)
    if isinstance(how_often, int):
        return (epoch + 1) % how_often != 0
    return epoch + 1 not in how_often


def variables_of_fit(model: keras.Model) -> dict[str, Any] | None:
    """Returns the local variables of the running `fit` of this model, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return None


def agree_on_callbacks(
    callbacks: list[keras.callbacks.Callback],
    epochs: int | None,
    process_set: ProcessSet | None,
    model: keras.Model,
) -> None:
    """Checks that all ranks call `fit` alike; every rank that trains has to call it.

    Args:
        callbacks: this rank's list.
        epochs: the epoch at which training ends on this rank; None if unknown.
        process_set: the ranks that train; None for all.
        model: the model, used to find the arguments of its `fit`.

    Raises:
        ValueError: the callbacks cannot be used on several ranks. All ranks raise it.
        tfdist.MismatchError: lists or arguments that have to be equal differ, or a rank
            has joined (`tfdist.join`). All ranks raise it.
    """
    if not may_have_other_ranks():
        return
    own = [dataclasses.asdict(describe(callback)) for callback in callbacks]
    shared = gather_from_all(
        {"arguments": _compared_arguments(model, epochs), "callbacks": own},
        "model.fit",
        name="check of the callbacks at the start of fit",
        process_set=process_set,
    )
    problem = find_problem(
        [[Entry(**entry) for entry in other["callbacks"]] for other in shared],
        [other["arguments"] for other in shared],
    )
    if problem is None:
        return
    if problem.mismatch:
        raise errors.MismatchError(problem.text)
    raise ValueError(problem.text)


def _compared_arguments(model: keras.Model, epochs: int | None) -> dict[str, str]:
    """Returns the arguments of the running `fit` that have to be equal, as text."""
    compared = {"epochs": str(epochs)}
    found = variables_of_fit(model)
    if found is None or "validation_freq" not in found:  # not Keras's own fit
        return compared
    has_validation = found.get("validation_data") is not None
    weights = found.get("class_weight")
    return compared | {
        "steps_per_epoch": str(found.get("steps_per_epoch")),
        "validation_data": "given" if has_validation else "none",
        "validation_freq": str(found["validation_freq"]) if has_validation else "-",
        "class_weight": str(sorted(weights.items(), key=str) if weights else None),
    }


def describe(callback: keras.callbacks.Callback) -> Entry:
    """Returns the entry that describes a callback to the rules."""
    cls = type(callback)
    settings = getattr(callback, "settings_of_all_ranks", None)
    if settings is not None:  # a callback of tfdist
        inner = getattr(callback, "callback", None)
        name = cls.__name__ + (f"({type(inner).__name__})" if inner else "")
        kind = next(c.__name__ for c in cls.__mro__ if c.__module__.startswith(_OURS))
        return Entry(name, kind, ours=True, settings=settings())
    kind = kind_of(callback)
    if kind == "TerminateOnNaN" and getattr(callback, "raise_error", False):
        kind = ""  # this callback ends the job on all ranks
    place = ""
    if kind in WRITES:
        place = str(getattr(callback, WRITES[kind], ""))
        place = place if "://" in place else os.path.abspath(place)
    settings = _arguments(callback) if kind in EVERYWHERE else {}
    return Entry(cls.__name__, kind, place=place, settings=settings)


def kind_of(callback: keras.callbacks.Callback) -> str:
    """Returns the name of the Keras class that a callback derives from, or ""."""
    for name in (*_KNOWN, "TerminateOnNaN"):
        cls = getattr(keras.callbacks, name, None)
        if cls is not None and isinstance(callback, cls):
            return name
    return ""


def _arguments(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns plain values of the callback's constructor arguments, without state."""
    names = inspect.signature(type(callback).__init__).parameters
    values = {name: getattr(callback, name, None) for name in names}
    return {k: v for k, v in values.items() if type(v) in _PLAIN and k != "verbose"}
