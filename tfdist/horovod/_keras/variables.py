"""`optimizer.variables` that can also be called as a function, as in Keras 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class CallableList(list[Any]):
    """A list that, when called, returns its members as a plain list.

    Keras 3 turned the method `variables` into a property: Keras 3 uses
    `optimizer.variables`, and scripts for Keras 2 use `optimizer.variables()`.

    Args:
        items: the members.
        on_call: function that is called first when the list is called; default: none.

    Example:
        >>> CallableList("ab")(), CallableList("ab")
        (['a', 'b'], ['a', 'b'])
    """

    def __init__(
        self, items: Iterable[Any] = (), on_call: Callable[[], None] | None = None
    ) -> None:
        super().__init__(items)
        self._on_call = on_call

    def __call__(self) -> list[Any]:
        """Returns the members."""
        if self._on_call is not None:
            self._on_call()
        return list(self)
