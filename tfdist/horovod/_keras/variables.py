"""`optimizer.variables`, also called as a function, as under Keras 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class CallableList(list[Any]):
    """A list that returns itself, as a plain list, when it is called.

    Keras 3 made a property of what was a method: `optimizer.variables` is right for
    Keras 3 and `optimizer.variables()` for scripts that were written before it.

    Args:
        items: the members.
        on_call: what to do first when it is called; default: nothing.

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
        """The members."""
        if self._on_call is not None:
            self._on_call()
        return list(self)
