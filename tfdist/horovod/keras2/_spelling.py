"""Warnings and errors about old spellings, and patches that can be undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tfdist.horovod._warnings import should_warn, stacklevel_outside

_MISSING = object()


class Keras2SpellingWarning(UserWarning):
    """A Keras 2 spelling was used; the message shows the Keras 3 spelling."""


class Patches:
    """Replaces attributes, and keeps the original values so that they can be restored.

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
        """Sets an attribute of a class or module, or an item of a dictionary."""
        items = owner if isinstance(owner, dict) else vars(owner)
        before = items.get(name, _MISSING)
        self._undo.append(lambda: _set(owner, name, before))
        _set(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute of a class or module with `make(attribute)`."""
        self.put(owner, name, make(vars(owner)[name]))

    def on_take_back(self, act: Callable[[], Any]) -> None:
        """Registers a function that `take_back` calls as well."""
        self._undo.append(act)

    def take_back(self) -> None:
        """Restores all original values, in reverse order."""
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
    """Warns once, and only on rank 0, that something has a new spelling.

    Args:
        old: the spelling that the program uses.
        new: the spelling to write instead.
    """
    text = f"{old} is a spelling of Keras 2. Write {new}."
    if should_warn(text):
        warnings.warn(text, Keras2SpellingWarning, stacklevel=stacklevel_outside())


def refuse(old: str, new: str) -> NotImplementedError:
    """Returns the error for a Keras 2 spelling that Keras 3 cannot support."""
    return NotImplementedError(f"{old} does not exist in Keras 3. {new}")
