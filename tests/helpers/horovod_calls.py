"""Which functions of `horovod.tensorflow` tests on several ranks call, and how.

`hvd` stands for the module and writes down the parameters that are given another value
than their default; `on_ranks` collects that from the worker processes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from helpers.ranks import run_ranks

import tfdist.horovod.tensorflow as horovod
from tfdist.horovod.tensorflow import _signatures

USED: set[str] = set()  # "name" and "name(parameter)", of all calls of `on_ranks`
_now: set[str] = set()  # the same, of this process


class Recorder:
    """A module or object of Horovod's, whose functions are written down."""

    def __init__(self, wrapped: Any, prefix: str = "") -> None:
        self._wrapped, self._prefix = wrapped, prefix

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name == "elastic":
            return Recorder(found, "elastic.")
        name = f"{self._prefix}{name}"
        return recording(name, found) if name in _signatures.SIGNATURES else found


hvd = Recorder(horovod)


def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which writes down how it is called."""
    known = inspect.signature(function)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _now.add(name)
        for parameter, value in known.bind(*args, **kwargs).arguments.items():
            if value is not known.parameters[parameter].default:
                _now.add(f"{name}({parameter})")
        return function(*args, **kwargs)

    return call


def report(result: Any) -> dict[str, Any]:
    """What a function that `on_ranks` runs returns: its result, and what it called."""
    used = sorted(_now)
    _now.clear()
    return {"result": result, "used": used}


def on_ranks(
    function: Callable[..., Any], size: int, *args: Any, **options: Any
) -> Any:
    """As `run_ranks`, of a function that returns `report(...)`."""
    answers = run_ranks(function, size, *args, **options)
    for answer in answers:
        USED.update(answer["used"])
    return [answer["result"] for answer in answers]


def rows() -> set[str]:
    """What `USED` has to have: every function, and each of its parameters."""
    wanted = set()
    for name, text in _signatures.SIGNATURES.items():
        wanted.add(name)
        parts = [part.partition("=")[0] for part in text.split(", ") if part]
        wanted |= {f"{name}({part.strip('*')})" for part in parts}
    return wanted
