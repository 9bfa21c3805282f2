"""Rank, settings and resources of this process in the world of ranks.

`core.world` starts and ends the world. This module does not need TensorFlow. The error
classes, which need it, are imported when an error is raised.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from tfdist.core import native
from tfdist.core.rendezvous import child_processes

if TYPE_CHECKING:
    from tfdist.core.process_sets import ProcessSet
    from tfdist.core.rendezvous.links import LinkCredentials
    from tfdist.core.rendezvous.on_demand_links import OnDemandLinks

_Resource = TypeVar("_Resource", bound="Resource")


class Resource(Protocol):
    """An object with threads or sockets that exists until `shutdown`."""

    def close(self) -> None:
        """Ends threads and sockets; takes at most 2 s and raises nothing."""


@dataclass
class State:
    """The state that this process keeps about its world."""

    topology: native.Topology | None = None
    pid: int = 0  # process that called init; a different process is a fork
    reduces_gradients: bool = False  # in this generation
    is_between_steps: bool = False  # of an elastic training: the weights are whole
    hides_failures: bool = False  # in a loop whose failed allreduces raise no error
    rehearses: bool = False  # a newcomer that has not joined its elastic job yet
    generation: int = 0
    shutdowns: int = 0  # how often this process has left a job
    on_demand: OnDemandLinks | None = None
    process_sets: list[ProcessSet] = field(default_factory=list)  # of this generation
    credentials: LinkCredentials | None = None
    settings: dict[str, dict[str, Any]] | None = None  # values at init
    address: str = ""
    hosts: tuple[str, ...] = ()  # host name of each rank; () if not connected
    resources: dict[str, Resource] = field(default_factory=dict)  # of this generation
    timeline: Path | None = None  # folder of the timeline


state = State()
lock = threading.RLock()  # protects starting, ending and resources


def note_gradients() -> None:
    """Records that this rank takes part in a reduction of gradients."""
    state.reduces_gradients = True


def get_resource(name: str, make: Callable[[], _Resource]) -> _Resource:
    """Returns a resource of this world, created on first use; `shutdown` closes it.

    Args:
        name: name of the resource.
        make: function that creates the resource.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    with lock:
        check_initialized()
        if name not in state.resources:
            state.resources[name] = make()
        return state.resources[name]  # type: ignore[return-value]


def credentials() -> tuple[LinkCredentials | None, str]:
    """Returns this rank's credentials (None if it has no links) and IP address."""
    return state.credentials, state.address


def setting(name: str) -> Any:
    """Returns a TFDIST_* variable's value at `init()`; before that, its current value.

    Changes to the environment after `init()` have no effect, because the ranks have
    compared the values in `init()`.

    Raises:
        native.CoreError: before `init()`, if a variable in the environment is
            malformed.
    """
    rows = state.settings
    return native.value(name) if rows is None else rows[name]["value"]


def generation() -> int:
    """Returns the number of the world's generation; equal on all ranks."""
    return state.generation


def is_rehearsing() -> bool:
    """Returns whether this process is a newcomer of an elastic job that has not joined.

    Such a process has the rank and the size that it may get when it joins, but its
    engine is not connected to other ranks.
    """
    return state.rehearses


def shutdowns() -> int:
    """Returns how often this process has left a job by `shutdown`.

    A change from one generation of an elastic job to the next does not count.
    """
    return state.shutdowns


def live_sets() -> list[ProcessSet]:
    """Returns the process sets that were added and not removed since `init()`."""
    return state.process_sets


def ranks_of_set(number: int) -> frozenset[int]:
    """Returns the ranks of a process set, given its number; 0: all ranks."""
    for one in state.process_sets:
        if one.id == number:
            return frozenset(one.ranks)
    return frozenset(range(size()))


def is_initialized() -> bool:
    """Returns whether this process has called `init()`, and not `shutdown()` since."""
    return state.topology is not None and state.pid == os.getpid()


def check_initialized() -> native.Topology:
    """Returns the topology of this rank.

    Raises:
        tfdist.NotInitializedError: `init()` has not been called, or this process is a
            fork of a process that has called it.
    """
    topology = state.topology
    if topology is None or state.pid != os.getpid():
        _raise_not_initialized()
    return topology


def rank() -> int:
    """Returns the index of this process: 0 <= rank < size.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().rank


def size() -> int:
    """Returns the number of processes of the job.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().size


def local_rank() -> int:
    """Returns the index of this process among those on its host; use it to pick a GPU.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().local_rank


def local_size() -> int:
    """Returns the number of processes of the job on this host.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().local_size


def cross_rank() -> int:
    """Returns the index of this process among those with the same local rank.

    There is one such process on each host with more than `local_rank()` processes.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().cross_rank


def cross_size() -> int:
    """Returns the number of hosts with a process of the same local rank as this one.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    return check_initialized().cross_size


def host_of(rank: int) -> str:
    """Returns the name of a rank's host.

    Args:
        rank: a rank of this job.
    """
    return state.hosts[rank] if rank < len(state.hosts) else os.uname().nodename


def fork_message() -> str:
    """Returns the error message for a process that is a fork of a rank."""
    return (
        f"process {os.getpid()} cannot use tfdist: it is a fork of process "
        f"{state.pid}, which had called tfdist.init(); start helper processes before "
        "tfdist.init(), or with multiprocessing's 'spawn' method"
    )


def _raise_not_initialized() -> NoReturn:
    message = "tfdist is not initialized; call tfdist.init() first"
    if state.topology is not None:
        message = fork_message()
    elif is_child := child_processes.refusal(os.environ):
        message = is_child
    raise_public(
        native.CoreError(
            native.FAILED_PRECONDITION,
            message,
            {"kind": "not_initialized", "cause": message},
        )
    )


def raise_public(error: native.CoreError) -> NoReturn:
    """Raises the public exception for a core error."""
    from tfdist.core import exceptions

    raise exceptions.from_core(error) from None
