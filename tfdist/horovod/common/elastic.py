"""The states of elastic jobs. Ranks don't come and go yet; a world of fixed size works.

`run` synchronises a state and calls the function once. What would change the ranks,
going on after one has failed, is an error that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

_UNSUPPORTED = (
    "Elastic training, in which ranks leave and come while a job runs, is not "
    "supported by this release of tfdist: hvd.elastic.run synchronises the state and "
    "runs the function once, with the ranks that tfdistrun has started. Save "
    "checkpoints (tfdist.callbacks.Checkpoint) and start the job again from the last."
)


class State:
    """Base class of in-memory state that is kept the same on all ranks.

    Args:
        bcast_object: gives all ranks an object of rank 0.
        get_rank: the rank of this process.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the functions that were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state to memory."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Looks for hosts that have come or gone: there are none."""

    def save(self) -> None:
        """Saves the state to memory."""
        raise NotImplementedError("A State has to define save().")

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError("A State has to define restore().")

    def sync(self) -> None:
        """Gives all ranks the state of rank 0."""
        raise NotImplementedError("A State has to define sync().")

    def reset(self) -> None:
        """Made anew when ranks have changed; nothing unless overridden."""


class ObjectState(State):
    """Plain Python values, as attributes.

    Args:
        bcast_object: gives all ranks an object of rank 0.
        get_rank: the rank of this process.
        **kwargs: name and value of each attribute.

    Example:
        >>> state = ObjectState(lambda obj: obj, lambda: 0, epoch=1)
        >>> state.epoch = 5
        >>> state.restore()
        >>> state.epoch
        1
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self.restore()

    def save(self) -> None:
        """Remembers the values of the attributes."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Gives the attributes the values that were saved last."""
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Gives all ranks what rank 0 has saved last."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Synchronises the state, the first argument of `func`, and calls it once.

    Args:
        func: of a `State` and more.

    Returns:
        A function that returns what `func` does. It raises NotImplementedError where
        Horovod would go on with other ranks: for a `HorovodInternalError` and a
        `HostsUpdatedInterrupt`. Errors of tfdist stay what they are.

    Example:
        >>> @run
        ... def train(state, more):
        ...     return state.epoch + more
        >>> train(ObjectState(lambda obj: obj, lambda: 0, epoch=3), 1)
        4
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        try:
            return func(state, *args, **kwargs)
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            raise NotImplementedError(_UNSUPPORTED) from error

    return wrapper
