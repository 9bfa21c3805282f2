"""Which functions of Horovod's interface tests on several ranks call, and how.

`recorded` stands before a function that a test runs on ranks: while it runs, all that
is in the table (`helpers.horovod_interface`) writes down with which parameters the test
calls it. `on_ranks` collects that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from helpers import horovod_interface as interface
from helpers.ranks import run_ranks

from tfdist.horovod import _warnings

# "row", "row(parameter)", and either with " raises" or " warns" behind it.
USED: set[str] = set()
DONE: set[str] = set()  # names of the functions that `on_ranks` has run
_TESTS = str(Path(__file__).resolve().parents[1])


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for `on_ranks`: returns what it has called beside its result."""

    @functools.wraps(function)
    def on_a_rank(*args: Any) -> dict[str, Any]:
        used: set[str] = set()
        with _watched(used):
            result = function(*args)
        return {"result": result, "used": sorted(used)}

    return on_a_rank


def on_ranks(
    function: Callable[..., Any], size: int, *args: Any, **options: Any
) -> list[Any]:
    """As `run_ranks`, of a function that is `recorded`."""
    answers = run_ranks(function, size, *args, **options)
    if size > 1:
        DONE.add(function.__qualname__)
        for answer in answers:
            USED.update(answer["used"])
    return [answer["result"] for answer in answers]


def in_mode(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, or a `tf.function` of it.

    Args:
        mode: "eager", "graph", or "autograph": the same graph, which takes seconds.
        function: the function.
    """
    if mode == "eager":
        return function
    return tf.function(function, autograph=mode == "autograph")


@contextlib.contextmanager
def _watched(used: set[str]) -> Iterator[None]:
    """Inside, what is in the table writes down its calls."""
    watchers: dict[int, Any] = {}
    before = []
    for row, first in interface.called_as().items():
        owner, name = interface.place_of(row)
        original = vars(owner)[name]
        if id(original) not in watchers:
            watchers[id(original)] = _watching(original, first, used)
        before.append((owner, name, original))
    for owner, name, original in before:
        setattr(owner, name, watchers[id(original)])
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _watching(original: Any, row: str, used: set[str]) -> Any:
    is_static = isinstance(original, staticmethod)
    function = original.__func__ if is_static else original
    known = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _noted(row, known, used, args, kwargs):
            return function(*args, **kwargs)

    return staticmethod(call) if is_static else call


class _noted:  # noqa: N801 - read as a function
    def __init__(
        self,
        row: str,
        known: inspect.Signature,
        used: set[str],
        args: Any,
        kwargs: Any,
    ) -> None:
        self._used, self._keys = used, [row]
        for name, value in known.bind(*args, **kwargs).arguments.items():
            if name not in ("self", "cls") and not is_default(
                value, known.parameters[name].default
            ):
                self._keys.append(f"{row}({name})")

    def __enter__(self) -> None:
        if not _is_called_by_a_test():
            self._keys = []
        self._used.update(self._keys)
        self._warned = [
            key
            for key in self._keys
            if interface.WITHOUT_MEANING.get(key) == interface.WARNS
        ]
        if self._warned:
            _warnings.reset()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._used.update(f"{key} raises" for key in self._keys)
        for key in self._warned:
            parameter = key.partition("(")[2].removesuffix(")")
            if any(parameter in text.split("=")[0] for text in _warnings._warned):
                self._used.add(f"{key} warns")


def is_default(value: Any, default: Any) -> bool:
    """Whether a call that gives `value` says no more than one that leaves it out.

    Plain values are the same where they are equal: a 1.0 that a test writes is another
    object than the 1.0 of the signature.
    """
    plain = bool | int | float | str
    if isinstance(value, plain) and isinstance(default, plain):
        return value == default
    return value is default


def _is_called_by_a_test() -> bool:
    """Not by another function of ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name.startswith("tfdist."):
            return False
        if file.startswith(_TESTS) and file != __file__:
            return True
        frame = frame.f_back
    return True
