"""State classes for elastic jobs; the number of ranks is fixed for now.

`run` synchronises a state and calls the function once. Continuing with different ranks
after a failure raises an error that explains this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

_UNSUPPORTED = (
    "Elastic training, in which ranks leave and join a running job, is not "
    "supported by this release of tfdist: hvd.elastic.run synchronises the state and "
    "runs the function once, on the ranks that tfdistrun has started. Save "
    "checkpoints (tfdist.callbacks.Checkpoint) and restart the job from the last one."
)


class State:
    """Base class of in-memory state that is the same on all ranks.

    Args:
        bcast_object: function that broadcasts an object of rank 0 to all ranks.
        get_rank: function that returns the rank of this process.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state to memory."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: hosts do not join or leave."""

    def save(self) -> None:
        """Saves the state to memory."""
        raise NotImplementedError("A State must define save().")

    def restore(self) -> None:
        """Restores the last saved state."""
        raise NotImplementedError("A State must define restore().")

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks."""
        raise NotImplementedError("A State must define sync().")

    def reset(self) -> None:
        """Is called after the ranks have changed; does nothing unless overridden."""


class ObjectState(State):
    """State of plain Python values, as attributes.

    Args:
        bcast_object: function that broadcasts an object of rank 0 to all ranks.
        get_rank: function that returns the rank of this process.
        **kwargs: name and initial value of each attribute.

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
        """Saves the values of the attributes."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Restores the last saved values of the attributes."""
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Broadcasts the values that rank 0 has saved last to all ranks."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function: synchronises its first argument, a state, and calls it once.

    Args:
        func: function of a `State` and further arguments.

    Returns:
        A function that returns the result of `func`. It raises NotImplementedError if
        Horovod would continue with different ranks, which is after a
        `HorovodInternalError` or `HostsUpdatedInterrupt`. tfdist's own errors are
        passed on.

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
