"""State that survives the loss of ranks, and the loop that restores it.

In a job started with `tfdistrun --min-np`, `run` calls the training function again when
a rank is lost, when a newcomer joins, or when a rank has to leave (docs/elastic.md). In
all other jobs, `run` calls the function once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tfdist.core.rendezvous import renewal
from tfdist.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

if TYPE_CHECKING:
    from tfdist.horovod._elastic_loop import ElasticLoop

_NOT_ELASTIC = (
    "hvd.elastic.run calls its function again only in an elastic job, and this job is "
    "not elastic. Start it with tfdistrun -np N --min-np M (docs/elastic.md), or save "
    "checkpoints and start the job again from the last one."
)


class State:
    """Base class of in-memory state that is the same on all ranks.

    A subclass defines `save`, `restore` and `sync`. To send objects, `sync` calls
    `self._bcast_object(obj)`, which sends the object of the rank with the newest
    commit.

    Args:
        bcast_object: function that broadcasts an object to all ranks, such as
            `hvd.broadcast_object`. Its keyword argument `root_rank` is the sending
            rank, by default 0.
        get_rank: function that returns the rank of this process.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]
    ) -> None:
        self._given_bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._newest_rank = 0  # root of `sync`
        # In a `sync` after the ranks have changed: whether this rank has the newest
        # commit.
        self._is_newest: bool | None = None
        self._loop: ElasticLoop | None = None  # set while `run` calls a function

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state in memory; then calls `check_host_updates`.

        In an elastic job, all ranks must call `commit` after the same steps.

        Raises:
            HostsUpdatedInterrupt: see `check_host_updates`.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises on all ranks if processes are ready to join, or ranks have to leave.

        In an elastic job, all ranks must call this method after the same steps, inside
        the function of `run`. In other jobs, and outside that function, it does
        nothing.

        Raises:
            HostsUpdatedInterrupt: the ranks are about to change. `run` handles this
                exception and calls the function again; on a rank that has to leave,
                `run` raises SystemExit.
        """
        if self._loop is not None:
            self._loop.check_for_change()

    def save(self) -> None:
        """Saves the state in memory."""
        raise NotImplementedError("A State must define save().")

    def restore(self) -> None:
        """Restores the last saved state."""
        raise NotImplementedError("A State must define restore().")

    def sync(self) -> None:
        """Broadcasts the newest state to all ranks."""
        raise NotImplementedError("A State must define sync().")

    def reset(self) -> None:
        """Called after the ranks have changed; does nothing unless overridden."""

    def _bcast_object(self, obj: Any, **options: Any) -> Any:
        """Returns the object of the rank with the newest commit."""
        if self._newest_rank:
            options = {"root_rank": self._newest_rank, **options}
        return self._given_bcast_object(obj, **options)

    def _describe(self) -> list[str]:
        """Returns text lines describing the state, which must be equal on all ranks."""
        return [type(self).__name__]


class ObjectState(State):
    """State of plain Python values, as attributes.

    Args:
        bcast_object: function that broadcasts an object, as in `State`.
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
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self.restore()

    def save(self) -> None:
        """Saves the values of the attributes."""
        self._saved_state = self._values_now()

    def restore(self) -> None:
        """Restores the last saved values of the attributes."""
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Broadcasts the newest attribute values to all ranks, and saves them."""
        self._take(self._newest_values())

    def _values_now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _newest_values(self) -> dict[str, Any]:
        """Returns the values of the rank with the newest commit; changes nothing."""
        values = self._values_now()
        return dict(self._bcast_object(values)) if values else values

    def _take(self, values: dict[str, Any]) -> None:
        self._saved_state = values
        ObjectState.restore(self)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a training function so that it is called again if the ranks change.

    In an elastic job (`tfdistrun -np N --min-np M`), the wrapped function

    - synchronizes its first argument, the state, and calls `func`;
    - after the loss of a rank, or if `func` raises `HorovodInternalError`, restores the
      state of the last commit, connects with the remaining ranks, calls
      `state.on_reset()` and `state.sync()`, and calls `func` again;
    - after a `HostsUpdatedInterrupt`, which `state.commit()` raises when a newcomer is
      ready to join or a rank has to leave, does the same without restoring the state.

    Traced functions are not traced again. A process that replaces a lost rank runs the
    program from its start, alone, and joins the other ranks when it calls the wrapped
    function. The wrapped function returns when `func` has returned on all ranks.

    In all other jobs, the state is synchronized and `func` is called once.

    Args:
        func: function whose first argument is a `State`; it may take more arguments.

    Returns:
        A function that returns the result of `func`. In an elastic job, it raises
        `tfdist.RankFailedError` if the job cannot continue; the state is then that of
        the last commit. In other jobs, it raises RuntimeError after a
        `HorovodInternalError` or `HostsUpdatedInterrupt`. All other exceptions of
        `func` are passed on.

    Example:
        >>> @run
        ... def train(state, more):
        ...     return state.epoch + more
        >>> train(ObjectState(lambda obj: obj, lambda: 0, epoch=3), 1)
        4
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        if renewal.is_elastic(os.environ):
            from tfdist.horovod._elastic_loop import ElasticLoop  # needs TensorFlow

            return ElasticLoop(state).run(func, args, kwargs)
        state.sync()
        try:
            return func(state, *args, **kwargs)
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            raise RuntimeError(_NOT_ELASTIC) from error

    return wrapper
