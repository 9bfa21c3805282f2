"""The event loop that runs the ranks of one host, for tfdistrun and for its agents.

`RankLoop` starts ranks, reads their output, notices when they end, passes signals on,
and ends all that is left with SIGTERM and then SIGKILL. `supervisor` and `agent` add
what differs: where the output goes, and when the ranks have to end. One thread; nothing
in it blocks once ranks run.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from tfdist.launch import processes
from tfdist.launch.signals import (
    SAME_SIGNAL_S,
    ChildProcesses,
    pass_on,
    signal_group,
)

READ_BYTES = 64 << 10
TERM_S = 1.0  # from SIGTERM to SIGKILL
DRAIN_S = 0.5  # for output that comes after the last rank's end
REAP_EVERY_S = 1.0
CHILDREN_STEP_S = 0.05  # between two looks whether children of the ranks still run
PAUSED_STEP_S = 0.05
_ENDING_STEP_S = 0.02


class Stream(Protocol):
    """Gets what a rank prints to its standard output, or error."""

    def feed(self, data: bytes) -> None:
        """Takes what came."""

    def end(self) -> None:
        """The rank has closed it."""


class RankLoop:
    """Runs the ranks of this host in an event loop.

    Args:
        on_exit: gets a rank that has ended, and its exit code.
        writers: returns the descriptors that something waits to be written to, and what
            writes to them.
        must_pause: returns whether ranks have to wait: nobody takes what they print.

    Attributes:
        running: the processes of ranks that have not ended, by rank.
        streams: what gets the output of the ranks, by the descriptors that are open.
        children: processes that the ranks have started, and that got the first signal.
        asked_s: when the ranks were first asked to end, by a monotonic clock.
        excluded_pids: children of this process that are no part of the job.
        paused: nothing is read from ranks, nor from any `source`.
    """

    def __init__(
        self,
        *,
        on_exit: Callable[[int, int], None],
        writers: Callable[[], Mapping[int, Callable[[], None]]],
        must_pause: Callable[[], bool],
    ) -> None:
        self.running: dict[int, processes.RankProcess] = {}
        self.streams: dict[int, Stream] = {}
        self.children = ChildProcesses()
        self.asked_s: float | None = None
        self.excluded_pids: set[int] = set()
        self.paused = False
        self._on_exit = on_exit
        self._writers = writers
        self._must_pause = must_pause
        self._guard: processes.Guard | None = None
        self._selector = selectors.DefaultSelector()
        self._sources: dict[int, Callable[[], None]] = {}

    # ---- descriptors ----

    def watch(self, descriptor: Any, action: Callable[[], None]) -> None:
        """Calls the action whenever something can be read, also while paused."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def watch_source(self, fd: int, action: Callable[[], None]) -> None:
        """Calls the action whenever something can be read, but not while paused."""
        self._sources[fd] = action
        if not self.paused:
            self.watch(fd, action)

    def forget(self, fd: int) -> None:
        """Ends `watch` or `watch_source`; the descriptor may be closed already."""
        self._sources.pop(fd, None)
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def step(self, until_s: float) -> None:
        """Waits for events until then at most, and handles those that came."""
        self._pause_if(self._must_pause())
        if self.paused:
            until_s = min(until_s, time.monotonic() + PAUSED_STEP_S)
        timeout_s = max(0.0, until_s - time.monotonic())
        writers = self._writers()
        for fd, write in writers.items():
            self._selector.register(fd, selectors.EVENT_WRITE, write)
        events = self._selector.select(timeout_s)
        for fd in writers:  # before the actions, which may close it
            self._selector.unregister(fd)
        for key, _ in events:
            key.data()

    def run_while(
        self,
        unfinished: Callable[[], bool],
        limit_s: float,
        step: Callable[[float], None],
        *,
        extended_by_pauses: bool = False,
    ) -> None:
        """Steps while `unfinished`, for so long at most.

        Args:
            unfinished: is asked before each step.
            limit_s: seconds.
            step: one step, until the given time at most.
            extended_by_pauses: whether time in which the loop is paused does not count.
        """
        deadline = time.monotonic() + limit_s
        while unfinished() and (begin_s := time.monotonic()) < deadline:
            step(deadline)
            if extended_by_pauses and self.paused:
                deadline += time.monotonic() - begin_s

    def close(self) -> None:
        """No step follows."""
        self._selector.close()

    def _pause_if(self, paused: bool) -> None:
        if paused == self.paused:
            return
        self.paused = paused
        for fd, action in self._sources.items():
            self._selector.unregister(fd) if paused else self.watch(fd, action)

    # ---- ranks ----

    def guard_with(self, guard: processes.Guard) -> None:
        """Must be called before the first rank is started."""
        self._guard = guard
        self.excluded_pids.add(guard.pid)

    def start(
        self,
        rank: int,
        stdout: Stream,
        stderr: Stream,
        *,
        command: list[str],
        environ: dict[str, str],
        terminal_columns: int | None,
        processors: Sequence[int] | None,
    ) -> None:
        """Starts a rank and watches it; see `processes.start_rank`.

        Raises:
            OSError: no process or descriptor left.
        """
        assert self._guard is not None  # noqa: S101 - guard_with was called
        started = processes.start_rank(
            rank,
            command,
            environ,
            terminal_columns=terminal_columns,
            processors=processors,
        )
        self._guard.watch(started.process.pid)
        self.running[rank] = started
        self.watch(started.pidfd, lambda: self._reap_rank(started))
        for fd, stream in ((started.stdout, stdout), (started.stderr, stderr)):
            self.streams[fd] = stream
            self.watch_source(fd, partial(self._read, fd))

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: the other end of a terminal was closed
            data = b""
        if data:
            self.streams[fd].feed(data)
        else:
            self._close_stream(fd)

    def _close_stream(self, fd: int) -> None:
        self.forget(fd)
        self.streams.pop(fd).end()
        os.close(fd)

    def close_streams(self) -> None:
        """Reads nothing more; processes that are left may keep the pipes open."""
        for fd in list(self.streams):
            self._close_stream(fd)

    def _reap_rank(self, ended: processes.RankProcess) -> None:
        code = ended.process.wait(5.0)
        self.forget(ended.pidfd)
        os.close(ended.pidfd)
        self.children.rank_ended(ended.process.pid, code)
        del self.running[ended.rank]
        self._on_exit(ended.rank, code)

    def reap(self) -> None:
        """Reaps orphans of the job; must be called now and then."""
        if self._guard is not None:
            processes.reap_orphans(self.excluded_pids | self._groups)

    # ---- signals ----

    @property
    def _groups(self) -> set[int]:
        """Process groups of the ranks that run: ids of their first processes."""
        return {started.process.pid for started in self.running.values()}

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks and all in their groups."""
        for group in self._groups:
            signal_group(group, number)

    def pass_on(self, number: int) -> None:
        """Sends a signal that ends nothing to those that expect it."""
        pass_on(self._groups, number)

    def ask_to_end(self, number: int) -> None:
        """Sends an ending signal; with the first one, `children` begin to count."""
        is_first = self.asked_s is None
        if is_first:  # only then: a rank may be dead while its children save
            self.children.note(self._groups, number)
        self.signal(number)
        if is_first:
            self.asked_s = time.monotonic()

    def is_repeated(self) -> bool:
        """Whether an ending signal that comes now means no more than the first one."""
        return (
            self.asked_s is not None and time.monotonic() < self.asked_s + SAME_SIGNAL_S
        )

    # ---- the end ----

    def _job_processes(self) -> list[int]:
        if self._guard is None:
            return []
        return processes.job_processes(
            self._guard.job_tag, excluded_pids=self.excluded_pids
        )

    def kill(self) -> None:
        """Sends SIGKILL to everything of the job that is on this host."""
        self.signal(signal.SIGKILL)
        processes.send_signal(self._job_processes(), signal.SIGKILL)

    def end_leftovers(self, step: Callable[[float], None]) -> None:
        """Ends what is left of the job on this host: ranks, their children, daemons.

        Args:
            step: one step, until the given time at most.
        """
        left = self._job_processes()
        if not left or self._guard is None:
            return
        processes.send_signal(left, signal.SIGTERM)
        processes.send_signal(left, signal.SIGCONT)  # a stopped process does not end
        deadline = time.monotonic() + TERM_S
        while left and time.monotonic() < deadline:
            step(min(deadline, time.monotonic() + _ENDING_STEP_S))
            self.reap()
            left = self._job_processes()
        processes.kill_all(
            self._guard.job_tag,
            excluded_pids=self.excluded_pids,
            waited_pids=self._groups,
        )
        self.reap()
