"""Links that are opened when data first needs them, in a world without a full mesh.

The thread of the rendezvous continues to run, with its listeners, until `shutdown`. The
core signals on an eventfd that it needs links. The higher of the two ranks connects and
the lower one waits, each with a deadline, so there is no conflict if both need the link
at the same time. If a link cannot be created, the operations of all ranks fail with an
error that names the peer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.links import Gathering, Window
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.mesh_types import close_ends

_log = logging.getLogger("tfdist")
_CLOSE_S = 5.0
_running: weakref.WeakSet[OnDemandLinks] = weakref.WeakSet()


class OnDemandLinks:
    """Opens links after the start.

    All coroutines run on one loop. `core_started` and `stop` are called from other
    threads, and `abandon` in a forked child.

    Args:
        rank: this rank.
        listeners: listeners of this rank, which this object then owns.
        gathering: connections received so far, for links with several sockets.
        connect: creates a link to a lower rank.
        describe: describes a rank for messages.
        timeout_s: time limit in seconds for opening a requested link.
        window: window of this rank, which this object then owns.
    """

    def __init__(
        self,
        *,
        rank: int,
        listeners: list[Listener],
        gathering: dict[int, Gathering],
        connect: Callable[[int], Awaitable[native.LinkEnd]],
        describe: Callable[[int], str],
        timeout_s: float,
        window: Window,
    ) -> None:
        self.wanted_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rank = rank
        self._listeners = listeners
        self._gathering = gathering
        self._connect = connect
        self._describe = describe
        self._timeout_s = timeout_s
        self._window = window
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._started = asyncio.Event()
        self._stopping = asyncio.Event()
        self._arrivals: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()
        _running.add(self)

    def core_started(self) -> None:
        """Starts passing links to the core, which now runs. Called from any thread."""
        self._loop.call_soon_threadsafe(self._started.set)

    def stop(self) -> None:
        """Ends the thread and closes the listeners. Not called from this thread."""
        if os.getpid() != self._pid:
            return  # a fork does not have this thread
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:
            return  # the loop has ended
        self._thread.join(_CLOSE_S)

    def abandon(self) -> None:
        """Closes the listeners in a forked child, which would keep them open."""
        for listener in self._listeners:
            listener.abandon()
        for gathering in self._gathering.values():
            gathering.close()

    async def run(self) -> None:
        """Serves until `stop`."""
        self._loop.add_reader(self.wanted_fd, self._look)
        try:
            await self._stopping.wait()
        finally:
            self._loop.remove_reader(self.wanted_fd)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for listener in self._listeners:
                await listener.close()
            for gathering in self._gathering.values():
                gathering.close()
            self._window.close()
            os.close(self.wanted_fd)

    async def take_accepted(self, end: native.LinkEnd) -> None:
        """Passes to the core a link that a higher rank has created."""
        try:
            await self._started.wait()
        except BaseException:
            close_ends([end])
            raise
        self._add(end)

    def _add(self, end: native.LinkEnd) -> None:
        self._arrival_of(end.peer).set()
        try:
            native.add_link(end)
        except native.CoreError as error:
            _log.debug(
                "the link on demand to rank %d is not needed: %s", end.peer, error
            )

    def _arrival_of(self, peer: int) -> asyncio.Event:
        return self._arrivals.setdefault(peer, asyncio.Event())

    def _look(self) -> None:
        os.eventfd_read(self.wanted_fd)
        for peer in native.take_link_requests():
            job = self._make(peer) if peer < self._rank else self._expect(peer)
            task = self._loop.create_task(self._open(peer, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make(self, peer: int) -> None:
        self._add(await self._connect(peer))

    async def _expect(self, peer: int) -> None:
        await self._arrival_of(peer).wait()

    async def _open(self, peer: int, job: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await job
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (TFDIST_START_TIMEOUT_S)"
            self._give_up(peer, f"not open within {limit}")
        except (OSError, RendezvousError) as error:
            self._give_up(peer, str(error))

    def _give_up(self, peer: int, why: str) -> None:
        native.abort(
            f"no link for data to {self._describe(peer)}: {why}; is the host of that "
            "rank reachable from this host (TFDIST_ADDRESS, a firewall)?"
        )


def _abandon_all() -> None:
    for links in list(_running):
        links.abandon()


os.register_at_fork(after_in_child=_abandon_all)
