"""Values for objects that cannot be keys of a dictionary, such as tensors."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakIdentityMap(Generic[V]):
    """Maps objects to values by identity, without keeping the objects alive.

    An entry ends with its object. Objects need support weak references, not hashing:
    tensors, variables and graphs are equal to others of their kind, or to none.

    Example:
        >>> import numpy as np
        >>> array, known = np.zeros(2), WeakIdentityMap()
        >>> known[array] = "zeros"
        >>> known.get(array), known.get(np.zeros(2))
        ('zeros', None)
        >>> del array
        >>> len(known)
        0
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, key: Any, value: V) -> None:
        ended = functools.partial(self._forget, id(key))
        self._entries[id(key)] = weakref.ref(key, ended), value

    def get(self, key: Any) -> V | None:
        """The value of `key`, None if it has none."""
        reference, value = self._entries.get(id(key), (None, None))
        return value if reference is not None and reference() is key else None

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: int, _reference: Any) -> None:
        self._entries.pop(key, None)
