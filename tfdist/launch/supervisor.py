"""Watches the ranks of a job from start to end. One thread, one loop."""

from __future__ import annotations

import enum
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfdist.launch import tree
from tfdist.launch.output import RankOutput, Sink, StreamMerger
from tfdist.launch.process import RankProcess
from tfdist.launch.report import RankEnd

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 64 << 10
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_SIGNAL_S = 25.0  # from a forwarded signal to SIGTERM and SIGKILL
_DRAIN_S = 0.5  # for output that comes after the last rank's end
_REAP_EVERY_S = 1.0


class _Phase(enum.Enum):
    RUNNING = "all is well"
    GRACE = "a rank failed; the others may say what they saw"
    SIGNALLED = "the user ends the job; the ranks may finish what they do"
    TERMINATING = "SIGTERM was sent"
    KILLING = "SIGKILL was sent"


@dataclass
class Outcome:
    """How the job ended.

    Attributes:
        ends: one a rank, in the order of their ends.
        signal: the first signal that this process got, None for none.
    """

    ends: list[RankEnd] = field(default_factory=list)
    signal: int | None = None


class Signals:
    """Turns signals into bytes on a pipe, which a selector can wait for."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda *_: None) for number in FORWARDED
        }

    def fileno(self) -> int:
        """For the selector."""
        return self._read

    def take(self) -> list[int]:
        """Numbers of the signals that came."""
        try:
            return [n for n in os.read(self._read, 64) if n in FORWARDED]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Puts the previous handlers back."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


class Supervisor:
    """Runs until every rank has ended and nothing of the job is left.

    Args:
        job: TFDIST_JOB_ID of the ranks.
        spare: process id of the guard.
        grace_s: seconds from the first failure to the end of the other ranks.
        told: returns what the ranks reported: rank → report.
        sinks: this process's standard output and error, to notice that a reader left.
    """

    def __init__(
        self,
        *,
        job: str,
        spare: int,
        grace_s: float,
        told: Callable[[], dict[int, dict[str, Any]]],
        sinks: list[Sink],
    ) -> None:
        self._job = job
        self._spare = spare
        self._grace_s = grace_s
        self._told = told
        self._sinks = sinks
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._running: set[int] = set()
        self._phase = _Phase.RUNNING
        self._phase_ends_s = float("inf")
        self._reap_at_s = time.monotonic() + _REAP_EVERY_S
        self._outcome = Outcome()
        self._open_streams: dict[int, StreamMerger] = {}

    def add(
        self,
        process: RankProcess,
        output: RankOutput,
        stdout: StreamMerger,
        stderr: StreamMerger,
    ) -> None:
        """Watches one more rank."""
        self._ranks[process.rank] = process
        self._outputs[process.rank] = output
        self._running.add(process.rank)
        self._selector.register(
            process.pidfd, selectors.EVENT_READ, lambda: self._on_end(process)
        )
        for fd, merger in ((process.stdout, stdout), (process.stderr, stderr)):
            self._open_streams[fd] = merger
            self._selector.register(
                fd, selectors.EVENT_READ, lambda fd=fd: self._on_output(fd)
            )

    def run(self, signals: Signals) -> Outcome:
        """Watches until the end."""
        self._selector.register(
            signals, selectors.EVENT_READ, lambda: self._on_signals(signals.take())
        )
        while self._running:
            self._step(min(self._phase_ends_s, time.monotonic() + _REAP_EVERY_S))
            if time.monotonic() >= self._phase_ends_s:
                self._next_phase()
            if self._sinks and any(sink.broken for sink in self._sinks):
                self._sinks = []  # once: what comes now has no reader anyway
                self._on_signals([signal.SIGTERM])
            self._reap()
        self._drain()
        self._end_leftovers()
        self._selector.unregister(signals)
        self._close()
        self._add_reports()
        return self._outcome

    def _step(self, until_s: float) -> None:
        """Waits for events until then, handles those that came."""
        timeout_s = max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _reap(self) -> None:
        """Now and then: looking through all processes takes a while."""
        if time.monotonic() >= self._reap_at_s:
            own = {process.process.pid for process in self._ranks.values()}
            tree.reap_orphans(own | {self._spare})
            self._reap_at_s = time.monotonic() + _REAP_EVERY_S

    def _on_output(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: the other end of a terminal was closed
            data = b""
        if data:
            self._open_streams[fd].feed(data)
            return
        self._selector.unregister(fd)
        self._open_streams.pop(fd).end()
        os.close(fd)

    def _on_end(self, process: RankProcess) -> None:
        code = process.process.wait(5.0)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        self._running.discard(process.rank)
        end = RankEnd(
            rank=process.rank,
            code=code,
            time_s=time.monotonic(),
            ended_by_us=self._phase in (_Phase.TERMINATING, _Phase.KILLING),
        )
        self._outcome.ends.append(end)
        if end.code != 0 and self._phase is _Phase.RUNNING:
            self._enter(_Phase.GRACE, self._grace_s)

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if self._phase in (_Phase.RUNNING, _Phase.GRACE):
                self._outcome.signal = self._outcome.signal or number
                self._signal_ranks(number)
                self._enter(_Phase.SIGNALLED, _SIGNAL_S)
            else:  # the second one: at once
                self._enter(_Phase.KILLING, 1.0)
                self._kill()

    def _enter(self, phase: _Phase, limit_s: float) -> None:
        self._phase = phase
        self._phase_ends_s = time.monotonic() + limit_s

    def _next_phase(self) -> None:
        if self._phase in (_Phase.GRACE, _Phase.SIGNALLED):
            self._signal_ranks(signal.SIGTERM)
            self._signal_ranks(signal.SIGCONT)  # a stopped process does not end
            self._enter(_Phase.TERMINATING, _TERM_S)
        else:
            self._enter(_Phase.KILLING, 1.0)
            self._kill()

    def _signal_ranks(self, number: int) -> None:
        for rank in self._running:
            tree.send_to_group(self._ranks[rank].process.pid, number)

    def _kill(self) -> None:
        for process in self._ranks.values():
            if process.rank in self._running:
                tree.send_to_group(process.process.pid, signal.SIGKILL)
        tree.send(tree.living(self._job, spare=self._spare), signal.SIGKILL)

    def _drain(self) -> None:
        """Reads what is still in the pipes; helpers may hold them open for ever."""
        deadline = time.monotonic() + _DRAIN_S
        while self._open_streams and time.monotonic() < deadline:
            self._step(deadline)

    def _end_leftovers(self) -> None:
        """Ends what the ranks left behind: helpers, daemons."""
        left = tree.living(self._job, spare=self._spare)
        if not left:
            return
        tree.send(left, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S
        while left and time.monotonic() < deadline:
            self._step(min(deadline, time.monotonic() + 0.02))
            tree.reap_orphans({self._spare})
            left = tree.living(self._job, spare=self._spare)
        tree.kill_all(self._job, spare=self._spare)
        tree.reap_orphans({self._spare})

    def _close(self) -> None:
        for fd, merger in self._open_streams.items():
            self._selector.unregister(fd)
            merger.end()
            os.close(fd)
        self._open_streams.clear()
        self._selector.close()

    def _add_reports(self) -> None:
        told = self._told()
        for end in self._outcome.ends:
            end.told = told.get(end.rank, {})
            end.tail = list(self._outputs[end.rank].tail)
