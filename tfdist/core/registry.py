"""State that tfdist keeps about objects of TensorFlow, Keras or the program.

A registry maps objects to values by identity, with weak references, so tfdist sets no
attributes on objects that it has not created. An entry ends with its object, unless
the value itself refers to the object: such a value belongs on the object.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakRegistry(Generic[V]):
    """Values of objects, by identity.

    Not a `weakref.WeakKeyDictionary`, which hashes and compares its keys: variables and
    tensors of TensorFlow cannot be hashed, and `==` compares their values.

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

        A method, because AutoGraph rewrites assignments to items in traced functions.
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
        # The identity may be that of an object that has just ended.
        return entry[1] if entry is not None and entry[0]() is obj else default

    def __contains__(self, obj: Any) -> bool:
        missing = object()
        return self.get(obj, missing) is not missing

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all values."""
        self._entries.clear()
