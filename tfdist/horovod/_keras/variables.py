"""`optimizer.variables` that can also be called as a function, as in Keras 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class CallableList(list[Any]):
    """A list that can also be called; a call returns its entries as a plain list.

    In Keras 2 `optimizer.variables()` is a method; in Keras 3 `optimizer.variables` is
    a property. This list supports both.

    Args:
        items: the entries.
        on_call: function to call whenever the list is called; default: none.

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
        """Returns the entries as a plain list."""
        if self._on_call is not None:
            self._on_call()
        return list(self)
