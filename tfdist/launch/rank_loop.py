"""The event loop that runs the ranks of one host, for tfdistrun and for its agents.

`RankLoop` starts ranks, reads their output, notices when they exit, passes signals on,
and terminates remaining processes with SIGTERM and then SIGKILL. `supervisor` and
`agent` add the parts that differ: the destination of the output, and when the ranks
must end. `RankLoop` uses one thread; nothing in it blocks while ranks run.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from tfdist.core.term_signal import SAME_SIGNAL_S
from tfdist.launch import processes
from tfdist.launch.cpu_share import BACKGROUND_NICE, CpuShares
from tfdist.launch.signals import (
    ENDING,
    ChildProcesses,
    ask_to_end,
    pass_on,
    signal_group,
)

READ_BYTES = 64 << 10
TERM_S = 1.0  # from SIGTERM to SIGKILL
DRAIN_S = 0.5  # for output that arrives after the last rank has exited
REAP_EVERY_S = 1.0
CHILDREN_STEP_S = 0.05  # between two checks for running children of the ranks
PAUSED_STEP_S = 0.05
_ENDING_STEP_S = 0.02


class Stream(Protocol):
    """Receives what a rank writes to its standard output or error."""

    def feed(self, data: bytes) -> None:
        """Processes received output."""

    def end(self) -> None:
        """Handles the end of the stream; called when the rank has closed it."""


class RankLoop:
    """Runs the ranks of this host in an event loop.

    Args:
        on_exit: function that is called with a rank that has exited, and its exit code.
        writers: function that returns the descriptors for which data is queued, each
            with the function that writes the data.
        must_pause: function that returns whether ranks must wait, because nobody reads
            their output.

    Attributes:
        running: processes of the ranks that have not exited, by rank.
        streams: receivers of the ranks' output, by open descriptor.
        children: processes of the ranks that got the first ending signal, or of ranks
            that such a signal has killed before.
        asked_s: monotonic time of the first ending signal to the ranks; None before it.
        excluded_pids: IDs of children of this process that do not belong to the job.
        paused: whether reading is paused: from the ranks, and from every descriptor of
            `watch_source`.
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
        self._shares = CpuShares()

    # ---- descriptors ----

    def watch(self, descriptor: Any, action: Callable[[], None]) -> None:
        """Calls the action whenever data can be read, even while paused."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def watch_source(self, fd: int, action: Callable[[], None]) -> None:
        """Calls the action whenever data can be read, except while paused."""
        self._sources[fd] = action
        if not self.paused:
            self.watch(fd, action)

    def forget(self, fd: int) -> None:
        """Undoes `watch` or `watch_source`; the descriptor may already be closed."""
        self._sources.pop(fd, None)
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def step(self, until_s: float) -> None:
        """Waits for events, at most until the time `until_s`, and handles them."""
        self._pause_if(self._must_pause())
        if self.paused:
            until_s = min(until_s, time.monotonic() + PAUSED_STEP_S)
        timeout_s = max(0.0, until_s - time.monotonic())
        writers = self._writers()
        for fd, write in writers.items():
            self._selector.register(fd, selectors.EVENT_WRITE, write)
        events = self._selector.select(timeout_s)
        for fd in writers:  # before the actions, which may close descriptors
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
        """Runs steps while `unfinished` returns True, for at most `limit_s` seconds.

        Args:
            unfinished: function that is called before each step.
            limit_s: time limit in seconds.
            step: function that runs one step, which lasts at most until a given time.
            extended_by_pauses: whether time during which the loop is paused is added to
                the limit.
        """
        deadline = time.monotonic() + limit_s
        while unfinished() and (begin_s := time.monotonic()) < deadline:
            step(deadline)
            if extended_by_pauses and self.paused:
                deadline += time.monotonic() - begin_s

    def close(self) -> None:
        """Releases the loop's resources; call no step afterwards."""
        self._selector.close()

    def _pause_if(self, paused: bool) -> None:
        if paused == self.paused:
            return
        self.paused = paused
        for fd, action in self._sources.items():
            self._selector.unregister(fd) if paused else self.watch(fd, action)

    # ---- ranks ----

    def guard_with(self, guard: processes.Guard) -> None:
        """Sets the guard; call it before the first rank is started."""
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
        is_elastic: bool,
        in_background: bool = False,
    ) -> None:
        """Starts a rank and watches it; see `processes.start_rank`.

        Args:
            rank: number of the rank, or of a member of an elastic job.
            stdout: receives the rank's standard output.
            stderr: receives the rank's standard error.
            command: program and arguments.
            environ: environment variables of the rank.
            terminal_columns: width of the rank's terminal; None for a pipe.
            processors: IDs of the CPUs that the rank may use; None for all.
            is_elastic: whether the job is elastic. Each of its processes has a session
                of its own, for which the share of the CPUs can be set. When it exits,
                the other processes in its group are killed, unless they may be saving
                after an ending signal.
            in_background: whether the process has a smaller share of the CPUs until
                `prioritize` is called. Only in an elastic job.

        Raises:
            OSError: no process or descriptor is available.
        """
        assert self._guard is not None  # noqa: S101 - guard_with was called
        started = processes.start_rank(
            rank,
            command,
            environ,
            terminal_columns=terminal_columns,
            processors=processors,
            has_own_session=is_elastic,
        )
        self._guard.watch(started.process.pid)
        if in_background:
            self._shares.set(started.process.pid, BACKGROUND_NICE)
        self.running[rank] = started
        self.watch(started.pidfd, lambda: self._reap_rank(started, is_elastic))
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
        """Stops reading; remaining processes may keep the pipes open."""
        for fd in list(self.streams):
            self._close_stream(fd)

    def _reap_rank(self, ended: processes.RankProcess, is_elastic: bool) -> None:
        # Before `wait`, the ID of the group cannot belong to other processes.
        group, number = ended.process.pid, _ending_signal(ended)
        if self.asked_s is None and number is not None:
            self.children.note({group}, number)
        elif self.asked_s is None and is_elastic:  # the job goes on, perhaps for days
            signal_group(group, signal.SIGKILL)
        code = ended.process.wait(5.0)
        self.forget(ended.pidfd)
        os.close(ended.pidfd)
        self.children.rank_ended(ended.process.pid, code)
        del self.running[ended.rank]
        self._shares.forget(ended.process.pid)
        self._on_exit(ended.rank, code)

    def reap(self) -> None:
        """Reaps orphans of the job, and retries `prioritize`; call this regularly."""
        self._shares.retry()
        if self._guard is not None:
            processes.reap_orphans(self.excluded_pids | self._groups)

    def prioritize(self, rank: int) -> None:
        """Gives a process in the background the same share of the CPUs as the ranks."""
        if started := self.running.get(rank):
            self._shares.set(started.process.pid, 0)

    def stopped(self) -> frozenset[int]:
        """Returns the ranks whose processes are stopped (SIGSTOP)."""
        return frozenset(
            rank
            for rank, started in self.running.items()
            if processes.is_stopped(started.process.pid)
        )

    # ---- signals ----

    @property
    def _groups(self) -> set[int]:
        """Process groups of the running ranks: the IDs of the ranks' processes."""
        return {started.process.pid for started in self.running.values()}

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks and all processes in their groups."""
        for group in self._groups:
            signal_group(group, number)

    def pass_on(self, number: int) -> None:
        """Sends a signal that does not end the job to the processes that expect it."""
        pass_on(self._groups, number)

    def ask_to_end(self, number: int) -> None:
        """Sends an ending signal; the first call also records the `children`."""
        is_first = self.asked_s is None
        if is_first:  # at a later call, a rank may be dead while its children save
            self.children.signal(number)  # those of ranks that have already exited
            self.children.note(self._groups, number)
        ask_to_end(self._groups, number)
        if is_first:
            self.asked_s = time.monotonic()

    def is_repeated(self) -> bool:
        """Returns whether an ending signal counts as a repetition of the first one.

        That is the case if it arrives within `SAME_SIGNAL_S` of the first one: a single
        event may send several signals.
        """
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
        """Sends SIGKILL to every process of the job on this host."""
        self.signal(signal.SIGKILL)
        processes.send_signal(self._job_processes(), signal.SIGKILL)

    def end_leftovers(self, step: Callable[[float], None]) -> None:
        """Terminates the job's remaining processes here: ranks, children, daemons.

        Args:
            step: function that runs one step, which lasts at most until a given time.
        """
        left = self._job_processes()
        if not left or self._guard is None:
            return
        processes.send_signal(left, signal.SIGTERM)
        processes.send_signal(left, signal.SIGCONT)  # a stopped process would not exit
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


def _ending_signal(ended: processes.RankProcess) -> int | None:
    """Returns the ending signal that killed a rank; None if it ended otherwise.

    Such a signal kills a shell at once. The program that the shell has started may
    still save its work.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    status = os.waitid(os.P_PIDFD, ended.pidfd, options)
    if status is None or status.si_code == os.CLD_EXITED:
        return None
    return status.si_status if status.si_status in ENDING else None
