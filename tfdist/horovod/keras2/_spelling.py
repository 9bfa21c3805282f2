"""Warnings and errors about old spellings, and attributes that can be put back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from tfdist import _runtime

_MISSING = object()


class Keras2SpellingWarning(UserWarning):
    """A spelling of Keras 2 was used; the message shows that of Keras 3."""


class Patches:
    """Attributes that were replaced, with what they were before.

    Example:
        >>> class Thing:
        ...     size = 1
        >>> patches = Patches()
        >>> patches.put(Thing, "size", 2)
        >>> patches.take_back()
        >>> Thing.size
        1
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Gives a class or module an attribute of its own."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute that a class or module has by what `make` makes."""
        self.put(owner, name, make(vars(owner)[name]))

    def remove(self, owner: Any, name: str) -> None:
        """Takes an attribute away."""
        self._before.append((owner, name, vars(owner)[name]))
        delattr(owner, name)

    def take_back(self) -> None:
        """Puts everything back as it was."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_told: set[str] = set()


def tell(old: str, new: str) -> None:
    """Warns, once in this process, that something has another spelling now.

    Only rank 0 does: all ranks run the same program.

    Args:
        old: what was written.
        new: what to write.
    """
    if old in _told:
        return
    _told.add(old)
    if _rank() == 0:
        text = f"{old} is a spelling of Keras 2. Write {new}."
        warnings.warn(text, Keras2SpellingWarning, stacklevel=_outside())


def refuse(old: str, new: str) -> NotImplementedError:
    """The error for what cannot be had under Keras 3."""
    return NotImplementedError(f"{old} is not there in Keras 3. {new}")


def forget() -> None:
    """Lets every spelling be told again."""
    _told.clear()


def _rank() -> int:
    if _runtime.is_initialized():
        return _runtime.rank()
    return int(os.environ.get("TFDIST_RANK") or 0)


def _outside() -> int:
    """How many frames up the user's own line is."""
    import sys

    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(module: str) -> bool:
    return module.startswith(("keras.", "tfdist.", "tensorflow."))
