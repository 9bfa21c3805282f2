"""The changes of callbacks in a hook or a validation, which can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

_MISSING = object()


class CallbackChanges:
    """Records the attributes of callbacks, and undoes later assignments to them.

    Changes within a list or a dict are not undone.

    Args:
        callbacks: the callbacks.
        logs: the logs of the hook, which are treated in the same way.

    Example:
        >>> import keras
        >>> from tfdist.callbacks._callback_changes import CallbackChanges
        >>> callback = keras.callbacks.LambdaCallback()
        >>> callback.count = 1
        >>> changes = CallbackChanges([callback])
        >>> callback.count = 2
        >>> changes.undo()
        >>> callback.count
        1
        >>> changes.redo()
        >>> callback.count
        2
    """

    def __init__(
        self,
        callbacks: Iterable[keras.callbacks.Callback],
        logs: dict[str, Any] | None = None,
    ) -> None:
        self._current: list[dict[str, Any]] = [vars(one) for one in callbacks]
        if logs is not None:
            self._current.append(logs)
        self._before = [dict(one) for one in self._current]
        self._changed: list[dict[str, Any]] = [{} for _ in self._current]

    def undo(self) -> None:
        """Gives the attributes and logs the values that they had at first."""
        for i, before in enumerate(self._before):
            current = self._current[i]
            self._changed[i] = {
                name: value
                for name, value in current.items()
                if before.get(name, _MISSING) is not value
            }
            current.update(before)
            for name in current.keys() - before.keys():
                del current[name]

    def redo(self) -> None:
        """Makes the changes again that `undo` has undone."""
        for current, changed in zip(self._current, self._changed, strict=True):
            current.update(changed)
