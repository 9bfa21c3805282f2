"""Stores tfdist's state about objects of TensorFlow, Keras or the program.

A registry maps objects to values by identity, with weak references, so that tfdist sets
no attributes on objects that it has not created. An entry is removed when its object is
deleted. A value that refers to the object would keep the object alive; store such a
value on the object instead.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakRegistry(Generic[V]):
    """Maps objects to values by identity, with weak references.

    `weakref.WeakKeyDictionary` is not suitable, because it hashes and compares its
    keys: TensorFlow variables and tensors cannot be hashed, and `==` compares their
    values.

    Example:
        >>> class Thing:
        ...     pass
        >>> thing, registry = Thing(), WeakRegistry()
        >>> registry.set(thing, 3)
        3
        >>> registry.get(thing), thing in registry, len(registry)
        (3, True, 1)
        >>> del thing
        >>> len(registry)
        0
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def set(self, obj: Any, value: V) -> V:
        """Sets the value of an object; returns the value.

        This is a method, because AutoGraph rewrites item assignments in traced
        functions.
        """
        key = id(obj)

        def remove(reference: weakref.ref[Any]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is reference:
                del self._entries[key]

        known = self._entries.get(key)
        reference = known[0] if known is not None and known[0]() is obj else None
        self._entries[key] = (reference or weakref.ref(obj, remove), value)
        return value

    def get(self, obj: Any, default: Any = None) -> V | Any:
        """Returns the value of an object, or `default`."""
        entry = self._entries.get(id(obj))
        # The identity may have belonged to an object that was just deleted.
        return entry[1] if entry is not None and entry[0]() is obj else default

    def __contains__(self, obj: Any) -> bool:
        missing = object()
        return self.get(obj, missing) is not missing

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all values."""
        self._entries.clear()
