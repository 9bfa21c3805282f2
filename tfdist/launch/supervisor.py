"""Watches the ranks of a job from start to end, and decides when they must end.

The ranks of this host are run by a `rank_loop`. Ranks on another host are run by the
loop of an agent there (`remote`), which reports events.
"""

from __future__ import annotations

import enum
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.core.rendezvous.errors import numbers
from tfdist.launch import agent_protocol, processes
from tfdist.launch.failure_summary import RankEnd, describe_code
from tfdist.launch.member_outputs import MemberOutputs
from tfdist.launch.outcome import Outcome, add_output, add_reports
from tfdist.launch.output import RankOutput, Screen, Sink, StreamMerger
from tfdist.launch.rank_loop import (
    CHILDREN_STEP_S,
    DRAIN_S,
    PAUSED_STEP_S,
    REAP_EVERY_S,
    TERM_S,
    RankLoop,
)
from tfdist.launch.remote import End, Started
from tfdist.launch.signals import PASSED_ON, Signals, signal_group

if TYPE_CHECKING:
    from tfdist.launch.connection import AgentConnection
    from tfdist.launch.elastic import ElasticJob
    from tfdist.launch.remote import RemoteHost

_SAVING_STEP_S = 1.0  # between two checks whether a host is still saving
_FINISH_S = 5.0  # for agents to end the remaining processes on their hosts
_LAST_WORDS_S = 1.0  # for a reader to read the rest after a signal ended the job


class _Phase(enum.Enum):
    RUNNING = "all ranks are running"
    GRACE = "a rank failed; the other ranks may report what they noticed"
    SIGNALLED = "the user ends the job; the ranks may finish their work"
    TERMINATING = "SIGTERM was sent"
    KILLING = "SIGKILL was sent"


class Supervisor:
    """Watches a job until every rank has exited and no process of the job is left.

    Args:
        guard: process that kills the processes of this host if this process is killed.
        grace_s: seconds from the first failure until the other ranks are terminated.
        signal_grace_s: seconds from a signal that ends the job until ranks that still
            run are terminated.
        told: function that returns the ranks' reports: rank, or member of an elastic
            job → report.
        stdout, stderr: standard output and error of this process. If their reader
            pauses, the ranks wait; if it closes them, the job ends.
        elastic: decides what happens when a rank of an elastic job is lost. Its member
            numbers are used here in place of ranks. If None, the job ends when a rank
            fails.
    """

    def __init__(
        self,
        *,
        guard: processes.Guard,
        grace_s: float,
        signal_grace_s: float,
        told: Callable[[], dict[int, dict[str, Any]]],
        stdout: Screen,
        stderr: Screen,
        elastic: ElasticJob | None = None,
    ) -> None:
        self._elastic = elastic
        self._loop = RankLoop(
            on_exit=lambda rank, code: self._ended(rank, code, time.monotonic()),
            writers=self._writers,
            must_pause=lambda: any(s.full and not s.drops for s in self._sinks),
        )
        self._loop.guard_with(guard)
        self._grace_s = grace_s
        self._signal_grace_s = signal_grace_s
        self._passed_on: set[int] = set()  # signals
        self._told = told
        self._sinks: list[Sink] = list({stdout.sink, stderr.sink})
        self._stderr = stderr
        self._remotes: list[RemoteHost] = []
        self._host_of: dict[int, RemoteHost] = {}
        self._outputs = MemberOutputs()
        self._running: set[int] = set()
        self._killed: set[int] = set()  # members killed at the request of `elastic`
        self._ends: dict[int, tuple[RankEnd, RankOutput]] = {}  # by rank or member
        self._phase = _Phase.RUNNING
        self._phase_ends_s = float("inf")
        self._periodic_at_s = time.monotonic() + REAP_EVERY_S
        self._outcome = Outcome()

    def start(
        self,
        output: RankOutput,
        stdout: StreamMerger,
        stderr: StreamMerger,
        *,
        member: int | None = None,
        **options: Any,
    ) -> None:
        """Starts a rank of this host, and watches it.

        Args:
            output: output of the rank; `output.rank` is the rank.
            stdout: receives the rank's standard output.
            stderr: receives the rank's standard error.
            member: number of a newcomer in an elastic job; default: the rank.
            options: further arguments for `RankLoop.start`.

        Raises:
            OSError: no process or descriptor is available.
        """
        number = output.rank if member is None else member
        self._loop.start(number, stdout, stderr, **options)
        self._outputs.add(number, output)
        self._running.add(number)
        if self._elastic is not None:
            self._elastic.started(number, self._loop.running[number].process.pid)

    # ---- for `elastic` ----

    @property
    def running(self) -> frozenset[int]:
        """Ranks, or members of an elastic job, that have not exited."""
        return frozenset(self._running)

    @property
    def paused(self) -> bool:
        """Whether nothing is read from ranks and hosts; see `RankLoop.paused`."""
        return self._loop.paused

    def kill(self, member: int) -> None:
        """Kills a member of an elastic job, if it is still running."""
        if member not in self._running:
            return
        self._killed.add(member)
        if remote := self._host_of.get(member):
            remote.kill_rank(member)
        else:
            signal_group(self._loop.running[member].process.pid, signal.SIGKILL)

    def prioritize(self, member: int) -> None:
        """Gives a newcomer the same share of the CPUs as the ranks."""
        if remote := self._host_of.get(member):
            remote.prioritize(member)
        else:
            self._loop.prioritize(member)

    def stopped(self) -> frozenset[int]:
        """Returns the members of an elastic job that are stopped (SIGSTOP)."""
        found = self._loop.stopped()
        found = found.union(*(remote.stopped for remote in self._remotes))
        return (found & self._running) - self._killed

    def formed(self, ranks: Mapping[int, int]) -> None:
        """Gives the members of a new generation their ranks; forgets lost ranks."""
        for member, rank in ranks.items():
            self._outputs[member].rank, self._outputs[member].name = rank, ""
        self._outputs.formed(self._running | ranks.keys())
        self._forget_failures()

    def _forget_failures(self) -> None:
        self._ends = {m: one for m, one in self._ends.items() if one[0].code == 0}

    def end_job(self) -> None:
        """Terminates the ranks after `grace_s` seconds, as after a failure."""
        if self._phase is _Phase.RUNNING:
            self._enter(_Phase.GRACE, self._grace_s)

    # ---- other hosts ----

    def add_remote(self, remote: RemoteHost) -> None:
        """Watches one more host; call `add_remote_rank` for its ranks first."""
        self._remotes.append(remote)
        own = remote.connection
        self._loop.watch_source(own.reading, lambda: self._on_remote(remote))
        if own.errors is not None:
            self._loop.watch(own.errors, lambda: self._on_said(remote))
        if own.pid is not None:
            self._loop.excluded_pids.add(own.pid)

    def _writers(self) -> dict[int, Callable[[], None]]:
        """Returns, by descriptor, the functions that write queued data to hosts."""
        waiting = (remote for remote in self._remotes if remote.wants_write)
        return {remote.connection.writing: remote.write for remote in waiting}

    def close_remote(self, remote: RemoteHost) -> None:
        """Closes the connection to a host, if it is open."""
        if remote.state != "closed":
            self._on_remote_ends(remote, remote.close())

    def add_remote_rank(
        self,
        remote: RemoteHost,
        output: RankOutput,
        stdout: StreamMerger,
        stderr: StreamMerger,
        *,
        member: int | None = None,
    ) -> None:
        """Watches one rank of another host, or a newcomer of an elastic job."""
        number = output.rank if member is None else member
        self._outputs.add_remote(number, output, stdout, stderr)
        self._host_of[number] = remote
        self._running.add(number)

    def run(self, signals: Signals) -> Outcome:
        """Watches the job until it ends; returns how it ended."""
        loop = self._loop
        loop.watch(signals, lambda: self._on_signals(signals.take()))
        if self._elastic is not None:
            loop.watch(self._elastic.wake_fd, self._poll_elastic)
        while self._running or self._children_go_on():
            pause_s = REAP_EVERY_S if self._running else CHILDREN_STEP_S
            loop.step(min(self._phase_ends_s, time.monotonic() + pause_s))
            if time.monotonic() >= self._phase_ends_s:
                self._next_phase()
            self._check_sinks()
            self._run_periodic()
        self._run_while(lambda: bool(loop.streams), DRAIN_S)
        self._conclude()
        self._finish_remotes()
        loop.end_leftovers(self._step)
        self._end_streams()
        self._flush()
        loop.close()
        self._conclude()  # again: children of the ranks may have failed in between
        for end, output in self._ends.values():
            add_output(end, output, self._stderr)
        self._outputs.close()
        return self._outcome

    def _children_go_on(self) -> bool:
        if self._phase is _Phase.SIGNALLED:
            return self._loop.children.are_left()
        if self._phase in (_Phase.RUNNING, _Phase.GRACE):
            return self._loop.children.may_be_signalled()
        return False

    def _step(self, until_s: float) -> None:
        self._loop.step(until_s)
        self._check_sinks()

    def _run_while(self, unfinished: Callable[[], bool], limit_s: float) -> None:
        """Runs the loop; pauses of the reader of the output extend the time limit."""
        self._loop.run_while(unfinished, limit_s, self._step, extended_by_pauses=True)

    def _check_sinks(self) -> None:
        """Ends the job if its output cannot be written."""
        errors = [sink.error for sink in self._sinks if sink.error]
        if not errors:
            return
        self._sinks = []  # report this once; later output has no reader
        if not isinstance(errors[0], BrokenPipeError):
            text = f"the job ends: its output cannot be written: {errors[0]}"
            self._stderr.complain(text)
        if self._running and self._phase in (_Phase.RUNNING, _Phase.GRACE):
            self._on_signals([signal.SIGTERM])

    def _run_periodic(self) -> None:
        """Runs checks that are too slow for every step, e.g. scanning all processes."""
        if time.monotonic() < self._periodic_at_s:
            return
        self._loop.reap()
        self._poll_elastic()
        self._outputs.close_ended(paused=self._loop.paused)
        for remote in self._open_remotes():
            if self._loop.paused:
                remote.heard()  # messages of the agent are not read while paused
            self._on_remote_ends(remote, remote.run_periodic())
        self._periodic_at_s = time.monotonic() + REAP_EVERY_S

    def _ended(self, rank: int, code: int, time_s: float, lost: str = "") -> None:
        self._running.discard(rank)
        remote = self._host_of.pop(rank, None)
        output = self._outputs[rank]
        end = RankEnd(
            rank=output.rank,
            code=code,
            time_s=time_s,
            # A lost host receives no signals, so tfdistrun did not end its ranks.
            ended_by_us=not lost
            and (
                self._phase in (_Phase.TERMINATING, _Phase.KILLING)
                or rank in self._killed
            ),
            lost=lost,
            host=remote.host.name if remote else socket.gethostname(),
        )
        if self._elastic is None or self._elastic.is_rank(rank):
            self._ends[rank] = (end, output)
        else:
            self._outputs.close_soon(rank)
        is_running, number = self._phase is _Phase.RUNNING, code - 128
        if self._elastic is not None and is_running and number in self._passed_on:
            # The program exited because of a signal that was passed on.
            self._outcome.signal = number
            self._enter(_Phase.SIGNALLED, self._signal_grace_s)
        if self._elastic is not None and self._is_elastic_now():
            how = "its host was lost" if lost else describe_code(code)
            self._elastic.ended(rank, how, failed=code != 0)
        elif self._elastic is not None and self._phase is _Phase.SIGNALLED:
            self._kill_newcomers(self._elastic)
        elif self._phase is _Phase.RUNNING and end.code != 0:
            self._enter(_Phase.GRACE, self._grace_s)

    def _kill_newcomers(self, elastic: ElasticJob) -> None:
        """Kills processes that have not joined, once all ranks have exited."""
        if not any(elastic.has_rank(member) for member in self._running):
            for member in self.running:
                self.kill(member)

    def _is_elastic_now(self) -> bool:
        """Returns whether requests of an elastic job's ranks are still answered."""
        if self._phase is _Phase.SIGNALLED:
            return self._outcome.signal == signal.SIGTERM
        return self._elastic is not None and self._phase is _Phase.RUNNING

    def _poll_elastic(self) -> None:
        if self._elastic is not None and self._is_elastic_now():
            self._elastic.poll()
        elif self._elastic is not None:
            self._elastic.drop_messages()

    def _on_remote(self, remote: RemoteHost) -> None:
        if remote.state == "closed":
            return
        ends = []
        for event in remote.read():
            match event:
                case agent_protocol.Frame(kind, number, body):
                    self._outputs.feed(number, kind, body)
                case Started(number, pid):
                    if self._elastic is not None:
                        self._elastic.started(number, pid)
                case End():
                    ends.append(event)
        self._on_remote_ends(remote, ends)

    def _open_remotes(self) -> list[RemoteHost]:
        return [remote for remote in self._remotes if remote.state != "closed"]

    def _on_remote_ends(self, remote: RemoteHost, ends: Sequence[End]) -> None:
        """Handles exits of a host's ranks, and the loss of its connection."""
        if remote.state == "closed":  # first, since new processes reuse descriptors
            self._forget(remote.connection)
        is_leaving = remote.is_leaving and remote.state == "running"
        is_lost = is_leaving or bool(remote.lost)
        is_running = bool(self._running) and self._is_elastic_now()
        if self._elastic is not None and is_lost and is_running:
            name, number = remote.host.name, remote.number
            self._elastic.lose_host(number, name, remote.lost)
        for end in ends:
            self._ended(end.rank, end.code, end.time_s, end.lost)

    def _on_said(self, remote: RemoteHost) -> None:
        if remote.state == "closed":
            return
        lines = remote.read_said()
        # Before its ranks start, the lines are kept for the message if the host fails.
        for line in lines if remote.state == "running" else ():
            self._stderr.print(f"[{remote.host.name}] {line}".encode())
        if not lines and remote.connection.errors is not None:
            self._loop.forget(remote.connection.errors)

    def _forget(self, closed: AgentConnection) -> None:
        """Stops watching a connection that was closed."""
        self._loop.forget(closed.reading)
        if closed.errors is not None:
            self._loop.forget(closed.errors)
        if closed.pid is not None:
            self._loop.excluded_pids.discard(closed.pid)

    def _finish_remotes(self) -> None:
        """Lets agents terminate their remaining processes; drops slow agents."""
        left_s = 0.0
        if self._phase is _Phase.SIGNALLED:
            left_s = max(0.0, self._phase_ends_s - time.monotonic())
        for remote in self._open_remotes():
            remote.finish(left_s, self._outcome.exit_code)
            if remote.state != "running":  # it is still connecting
                remote.kill()
        self._run_while(lambda: bool(self._open_remotes()), left_s + _FINISH_S)
        for remote in self._open_remotes():
            remote.kill()
            self._on_remote_ends(remote, remote.close("it did not end in time"))

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in PASSED_ON:
                self._passed_on.add(number)
                self._loop.pass_on(number)
                self._signal_remotes(number)
            elif self._phase in (_Phase.RUNNING, _Phase.GRACE):
                for sink in self._sinks:
                    sink.drops = True  # ranks can save even if the reader is paused
                self._outcome.signal = self._outcome.signal or number
                elastic = self._elastic if self._phase is _Phase.RUNNING else None
                if elastic is not None and number == signal.SIGTERM:
                    elastic.preempt()
                self._loop.ask_to_end(number)
                self._signal_remotes(number)
                self._enter(_Phase.SIGNALLED, self._signal_grace_s)
            elif self._phase is _Phase.SIGNALLED and self._loop.is_repeated():
                continue
            else:  # a second signal kills the job at once
                self._enter(_Phase.KILLING, 1.0)
                self._kill()

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
            self._signal_ranks(signal.SIGCONT)  # a stopped process would not exit
            self._enter(_Phase.TERMINATING, TERM_S)
        else:
            self._enter(_Phase.KILLING, 1.0)
            self._kill()

    def _tell_too_short(self) -> None:
        """Reports the ranks that are killed because they have not exited in time."""
        members = self._running
        if self._elastic is not None:  # newcomers have nothing to save
            members = {m for m in members if self._elastic.has_rank(m)}
        if members:
            ranks = sorted(self._outputs[member].rank for member in members)
            self._stderr.complain(
                f"still running {self._signal_grace_s:g} s after the signal, and "
                f"killed now: {numbers(ranks)}; unsaved work is lost. Give the ranks "
                "more time with --signal-grace-s"
            )

    def _signal_ranks(self, number: int) -> None:
        self._loop.signal(number)
        self._signal_remotes(number)

    def _signal_remotes(self, number: int) -> None:
        for remote in self._remotes:
            remote.send(do="signal", number=int(number))

    def _kill(self) -> None:
        for remote in self._remotes:
            remote.send(do="kill")
        self._loop.kill()

    def _flush(self) -> None:
        """Waits until all output has been written; after a signal, for at most 1 s."""
        ends_s = float("inf")
        while not all(sink.empty for sink in self._sinks):
            if self._outcome.signal is not None:
                ends_s = min(ends_s, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() >= ends_s:
                return
            for sink in self._sinks:
                sink.flush(PAUSED_STEP_S)
            self._step(time.monotonic())

    def _end_streams(self) -> None:
        self._outputs.end_streams()
        self._loop.close_streams()

    def _conclude(self) -> None:
        """Determines how the job ended, from exit codes and the ranks' reports."""
        told = self._told()
        clocks_s = {remote.host.name: remote.clock_s for remote in self._remotes}
        if self._elastic is not None:
            self._outcome.is_preempted = self._elastic.is_preempted
        if self._elastic is not None and self._elastic.finished:
            # Replacements that were lost before they joined did not matter.
            self._forget_failures()
        ends = {number: end for number, (end, _) in self._ends.items()}
        add_reports(ends, told, clocks_s)
        self._outcome.ends = [*ends.values()]
