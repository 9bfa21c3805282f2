"""Warnings and errors about old spellings, and attributes that can be put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tfdist.horovod._warnings import should_warn, stacklevel_outside

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
        self._undo: list[Callable[[], Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Gives a class or module an attribute of its own, or a dictionary an item."""
        items = owner if isinstance(owner, dict) else vars(owner)
        before = items.get(name, _MISSING)
        self._undo.append(lambda: _set(owner, name, before))
        _set(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute that a class or module has by what `make` makes."""
        self.put(owner, name, make(vars(owner)[name]))

    def on_take_back(self, act: Callable[[], Any]) -> None:
        """Lets `take_back` call `act` as well."""
        self._undo.append(act)

    def take_back(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()


def _set(owner: Any, name: str, value: Any) -> None:
    is_dict = isinstance(owner, dict)
    if value is not _MISSING:
        owner.__setitem__(name, value) if is_dict else setattr(owner, name, value)
    elif is_dict:
        del owner[name]
    else:
        delattr(owner, name)


def tell(old: str, new: str) -> None:
    """Warns, once in this process, that something has another spelling now.

    Args:
        old: what was written.
        new: what to write.
    """
    text = f"{old} is a spelling of Keras 2. Write {new}."
    if should_warn(text):
        warnings.warn(text, Keras2SpellingWarning, stacklevel=stacklevel_outside())


def refuse(old: str, new: str) -> NotImplementedError:
    """The error for what cannot be had under Keras 3."""
    return NotImplementedError(f"{old} is not there in Keras 3. {new}")
