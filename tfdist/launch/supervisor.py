"""Watches the ranks of a job from start to end. One thread, one loop.

The ranks of this host are its own children; those of other hosts are looked after by an
agent there (`remote`), which passes on what happens.
"""

from __future__ import annotations

import enum
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfdist.core.rendezvous.errors import numbers
from tfdist.launch import agent_protocol, processes, signals
from tfdist.launch.failure_summary import RankEnd
from tfdist.launch.output import (
    RankOutput,
    Screen,
    Sink,
    StreamMerger,
    complain,
)
from tfdist.launch.processes import RankProcess
from tfdist.launch.signals import PASSED_ON, SAME_SIGNAL_S, Signals

if TYPE_CHECKING:
    from tfdist.launch.remote import End, RemoteHost

_READ_BYTES = 64 << 10
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_HELPERS_STEP_S = 0.05
_DRAIN_S = 0.5  # for output that comes after the last rank's end
_REAP_EVERY_S = 1.0
_SAVING_STEP_S = 1.0  # between two looks whether a host still saves
_FINISH_S = 5.0  # for agents, to end what is left on their hosts
_LAST_WORDS_S = 1.0  # for a reader, to take what is left when the user ended the job
_PAUSED_STEP_S = 0.05


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
        joined: whether a rank has called `tfdist.init()`.
        memory_bytes: most that a process of the ranks has used.
    """

    ends: list[RankEnd] = field(default_factory=list)
    signal: int | None = None
    joined: bool = False
    memory_bytes: int = 0


class Supervisor:
    """Runs until every rank has ended and nothing of the job is left.

    Args:
        job_tag: value of JOB_TAG_VARIABLE in the environment of this host's ranks.
        guard_pid: process id of the guard.
        grace_s: seconds from the first failure to the end of the other ranks.
        signal_grace_s: seconds from a signal that ends the job to that of the ranks.
        told: returns what the ranks reported: rank → report.
        stdout, stderr: this process's own. When their reader pauses the ranks have to
            wait; when it leaves the job ends.
    """

    def __init__(
        self,
        *,
        job_tag: str,
        guard_pid: int,
        grace_s: float,
        signal_grace_s: float,
        told: Callable[[], dict[int, dict[str, Any]]],
        stdout: Screen,
        stderr: Screen,
    ) -> None:
        self._job_tag = job_tag
        self._guard_pid = guard_pid
        self._grace_s = grace_s
        self._signal_grace_s = signal_grace_s
        self._told = told
        self._sinks: list[Sink] = list({stdout.sink, stderr.sink})
        self._paused = False  # nothing is read that a sink could not take
        self._stderr = stderr
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, RankProcess] = {}
        self._remotes: list[RemoteHost] = []
        self._host_of: dict[int, RemoteHost] = {}
        self._mergers: dict[tuple[int, bytes], StreamMerger] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._running: set[int] = set()
        self._phase = _Phase.RUNNING
        self._phase_ends_s = float("inf")
        self._helpers = signals.ChildProcesses()  # of this host
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
            self._watch(fd)

    def add_remote(self, remote: RemoteHost) -> None:
        """Watches one more host; `add_remote_rank` its ranks before."""
        self._remotes.append(remote)
        self._watch_remote(remote)
        self._selector.register(
            remote.stderr, selectors.EVENT_READ, lambda: self._on_said(remote)
        )

    def add_remote_rank(
        self,
        remote: RemoteHost,
        output: RankOutput,
        stdout: StreamMerger,
        stderr: StreamMerger,
    ) -> None:
        """Watches one rank of another host."""
        rank = output.rank
        self._outputs[rank] = output
        self._host_of[rank] = remote
        self._mergers[rank, agent_protocol.STDOUT] = stdout
        self._mergers[rank, agent_protocol.STDERR] = stderr
        self._running.add(rank)

    def _watch(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._on_output(fd))

    def _watch_remote(self, remote: RemoteHost) -> None:
        self._selector.register(
            remote.stdout, selectors.EVENT_READ, lambda: self._on_remote(remote)
        )

    def run(self, signals: Signals) -> Outcome:
        """Watches until the end."""
        self._selector.register(
            signals, selectors.EVENT_READ, lambda: self._on_signals(signals.take())
        )
        while self._running or self._helpers_go_on():
            pause_s = _REAP_EVERY_S if self._running else _HELPERS_STEP_S
            self._step(min(self._phase_ends_s, time.monotonic() + pause_s))
            if time.monotonic() >= self._phase_ends_s:
                self._next_phase()
            self._check_sinks()
            self._run_periodic()
        self._drain()
        self._finish_remotes()
        self._end_leftovers()
        self._end_streams()
        self._flush()
        self._selector.close()
        self._add_reports()
        return self._outcome

    def _helpers_go_on(self) -> bool:
        return self._phase is _Phase.SIGNALLED and self._helpers.are_left()

    def _step(self, until_s: float) -> None:
        """Waits for events until then, handles those that came."""
        self._pause_if(any(sink.full and not sink.drops for sink in self._sinks))
        if self._paused:
            until_s = min(until_s, time.monotonic() + _PAUSED_STEP_S)
        timeout_s = max(0.0, until_s - time.monotonic())
        writers = [remote for remote in self._remotes if remote.wants_write]
        for remote in writers:
            self._selector.register(remote.stdin, selectors.EVENT_WRITE, remote.write)
        events = self._selector.select(timeout_s)
        for remote in writers:
            self._selector.unregister(remote.stdin)
        for key, _ in events:
            key.data()

    def _pause_if(self, paused: bool) -> None:
        """Reads nothing from ranks and agents, or reads again."""
        if paused == self._paused:
            return
        self._paused = paused
        for fd in self._open_streams:
            self._selector.unregister(fd) if paused else self._watch(fd)
        for remote in self._remotes:
            if remote.state == "closed":
                continue
            if paused:
                self._selector.unregister(remote.stdout)
            else:
                self._watch_remote(remote)

    def _check_sinks(self) -> None:
        """Ends the job when what it prints cannot be written."""
        errors = [sink.error for sink in self._sinks if sink.error]
        if not errors:
            return
        self._sinks = []  # once: what comes now has no reader anyway
        if not isinstance(errors[0], BrokenPipeError):
            complain(f"the job ends: nothing can be written any more: {errors[0]}")
        if self._running and self._phase in (_Phase.RUNNING, _Phase.GRACE):
            self._on_signals([signal.SIGTERM])

    def _run_periodic(self) -> None:
        """Now and then: looking through all processes takes a while."""
        if time.monotonic() >= self._reap_at_s:
            processes.reap_orphans(self._own_children())
            for remote in self._remotes:
                if self._paused:
                    remote.heard()  # for all that is known
                self._on_remote_ends(remote, remote.run_periodic())
            self._reap_at_s = time.monotonic() + _REAP_EVERY_S

    def _own_children(self) -> set[int]:
        """Processes that are buried by their Popen objects."""
        own = {process.process.pid for process in self._ranks.values()}
        return own | {r.process.pid for r in self._remotes} | {self._guard_pid}

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
        self._helpers.rank_ended(process.process.pid, code)
        self._ended(process.rank, code, time.monotonic())

    def _ended(self, rank: int, code: int, time_s: float, lost: str = "") -> None:
        self._running.discard(rank)
        remote = self._host_of.get(rank)
        end = RankEnd(
            rank=rank,
            code=code,
            time_s=time_s,
            # A host that is off hears nothing: what was sent to it has ended no rank.
            ended_by_us=not lost
            and self._phase in (_Phase.TERMINATING, _Phase.KILLING),
            lost=lost,
            host=remote.host.name if remote else socket.gethostname(),
        )
        self._outcome.ends.append(end)
        if end.code != 0 and self._phase is _Phase.RUNNING:
            self._enter(_Phase.GRACE, self._grace_s)

    # ---- other hosts ----

    def _on_remote(self, remote: RemoteHost) -> None:
        if remote.state == "closed":
            return
        ends = []
        for event in remote.read():
            if isinstance(event, agent_protocol.Frame):
                if merger := self._mergers.get((event.rank, event.kind)):
                    merger.feed(event.body)
            else:
                ends.append(event)
        self._on_remote_ends(remote, ends)

    def _on_remote_ends(self, remote: RemoteHost, ends: Sequence[End]) -> None:
        for end in ends:
            self._ended(end.rank, end.code, end.time_s, end.lost)
        if remote.state == "closed":
            for fd in (remote.stdout, remote.stderr):
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)

    def _on_said(self, remote: RemoteHost) -> None:
        if remote.state == "closed":
            return
        lines = remote.read_said()
        for line in lines:
            self._stderr.print(f"[{remote.host.name}] {line}".encode())
        if not lines:
            self._selector.unregister(remote.stderr)

    def _finish_remotes(self) -> None:
        """Lets the agents end what is left on their hosts; those that do not, go."""
        left_s = 0.0
        if self._phase is _Phase.SIGNALLED:
            left_s = max(0.0, self._phase_ends_s - time.monotonic())
        for remote in self._remotes:
            remote.send(do="finish", helpers_s=left_s)
        self._go_on(
            left_s + _FINISH_S,
            lambda: any(one.state != "closed" for one in self._remotes),
        )
        for remote in self._remotes:
            remote.kill()
            self._on_remote_ends(remote, remote.close("it did not end in time"))

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in PASSED_ON:
                signals.pass_on(self._own_groups(), number)
                self._signal_remotes(number)
            elif self._phase in (_Phase.RUNNING, _Phase.GRACE):
                for sink in self._sinks:
                    sink.drops = True  # whatever its reader does, the ranks can save
                self._outcome.signal = self._outcome.signal or number
                self._helpers.note(self._own_groups(), number)
                self._signal_ranks(number)
                self._enter(_Phase.SIGNALLED, self._signal_grace_s)
            elif self._is_the_same_signal():
                continue
            else:  # the second one: at once
                self._enter(_Phase.KILLING, 1.0)
                self._kill()

    def _is_the_same_signal(self) -> bool:
        """Whether another one so soon after the first means nothing more."""
        if self._phase is not _Phase.SIGNALLED:
            return False
        signalled_s = self._phase_ends_s - self._signal_grace_s
        return time.monotonic() < signalled_s + SAME_SIGNAL_S

    def _enter(self, phase: _Phase, limit_s: float) -> None:
        self._phase = phase
        self._phase_ends_s = time.monotonic() + limit_s

    def _next_phase(self) -> None:
        if self._phase is _Phase.GRACE and any(one.saves for one in self._remotes):
            self._enter(_Phase.GRACE, _SAVING_STEP_S)
        elif self._phase in (_Phase.GRACE, _Phase.SIGNALLED):
            if self._phase is _Phase.SIGNALLED:
                self._tell_too_short()
            self._signal_ranks(signal.SIGTERM)
            self._signal_ranks(signal.SIGCONT)  # a stopped process does not end
            self._enter(_Phase.TERMINATING, _TERM_S)
        else:
            self._enter(_Phase.KILLING, 1.0)
            self._kill()

    def _tell_too_short(self) -> None:
        """Says which ranks are killed before they have ended by themselves."""
        if self._running:
            complain(
                f"not ended within {self._signal_grace_s:g} s of the signal, and "
                f"killed now: {numbers(sorted(self._running))}; what they had not "
                "saved is lost. Give them more time with --signal-grace-s"
            )

    def _signal_ranks(self, number: int) -> None:
        for group in self._own_groups():
            signals.signal_group(group, number)
        self._signal_remotes(number)

    def _own_groups(self) -> set[int]:
        """The process groups of this host's ranks that run."""
        running = self._running & self._ranks.keys()
        return {self._ranks[rank].process.pid for rank in running}

    def _signal_remotes(self, number: int) -> None:
        for remote in self._remotes:
            remote.send(do="signal", number=int(number))

    def _kill(self) -> None:
        for remote in self._remotes:
            remote.send(do="kill")
        for group in self._own_groups():
            signals.signal_group(group, signal.SIGKILL)
        excluded = {self._guard_pid, *(remote.process.pid for remote in self._remotes)}
        processes.send_signal(
            processes.job_processes(self._job_tag, excluded_pids=excluded),
            signal.SIGKILL,
        )

    def _go_on(self, limit_s: float, unfinished: Callable[[], bool]) -> None:
        """Steps while `unfinished`, for `limit_s` seconds at most.

        Time in which the reader of the output pauses does not count: a signal ends it.
        """
        deadline = time.monotonic() + limit_s
        while unfinished() and (begin_s := time.monotonic()) < deadline:
            self._step(deadline)
            self._check_sinks()
            if self._paused:
                deadline += time.monotonic() - begin_s

    def _drain(self) -> None:
        """Reads what is still in the pipes; helpers may hold them open for ever."""
        self._go_on(_DRAIN_S, lambda: bool(self._open_streams))

    def _flush(self) -> None:
        """Lets the reader of the output take all of it, or the user end that too."""
        ends_s = float("inf")
        while not all(sink.empty for sink in self._sinks):
            if self._outcome.signal is not None:
                ends_s = min(ends_s, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() >= ends_s:
                return
            for sink in self._sinks:
                sink.flush(_PAUSED_STEP_S)
            self._step(time.monotonic())
            self._check_sinks()

    def _end_leftovers(self) -> None:
        """Ends what the ranks left behind: helpers, daemons."""
        left = processes.job_processes(self._job_tag, excluded_pids={self._guard_pid})
        if not left:
            return
        processes.send_signal(left, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S
        while left and time.monotonic() < deadline:
            self._step(min(deadline, time.monotonic() + 0.02))
            processes.reap_orphans(self._own_children())
            left = processes.job_processes(
                self._job_tag, excluded_pids={self._guard_pid}
            )
        processes.kill_all(self._job_tag, excluded_pids={self._guard_pid})
        processes.reap_orphans(self._own_children())

    def _end_streams(self) -> None:
        for remote_merger in self._mergers.values():
            remote_merger.end()
        self._pause_if(True)
        for fd, merger in self._open_streams.items():
            merger.end()
            os.close(fd)
        self._open_streams.clear()

    def _add_reports(self) -> None:
        told = self._told()
        for end in self._outcome.ends:
            end.told = told.get(end.rank, {})
            remote = self._host_of.get(end.rank)
            if remote and "time_s" in end.told:  # by that host's clock
                time_s = float(end.told["time_s"]) + remote.clock_s
                end.told = {**end.told, "time_s": time_s}
            output = self._outputs[end.rank]
            end.tail = list(output.tail)
            end.tail_is_shown = output.tail_is_shown(self._stderr)
            if full := end.told.get("traceback"):
                output.note(f"tfdistrun: the whole traceback:\n{full}")
