"""Starts and supervises the ranks of a remote host for tfdistrun.

`python -m tfdist.launch.agent` is started through ssh. It receives the job, including
the secret, through its standard input, since other users could read its arguments. It
sends the ranks' output and exit codes through its standard output (`agent_protocol`).
With `--nnodes`, tfdistrun itself is the agent, over a TCP connection (`nodes.join`).

When the connection ends, because tfdistrun was killed or the network failed, the agent
terminates all processes that it has started. If nothing arrives for 30 s, not even
tfdistrun's sign of life, the connection is considered dead. After a signal to the agent
itself, the ranks have as much time to save as after a signal to tfdistrun. A guard
process kills the ranks if the agent itself is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous.secret import keep_in_memory
from tfdist.core.term_signal import EXIT_CODE, SAME_SIGNAL_S
from tfdist.core.version import __version__
from tfdist.launch import agent_protocol, binding, processes
from tfdist.launch.agent_checks import PrepareError, prepare, rank_environ
from tfdist.launch.connection import Connection
from tfdist.launch.failure_summary import signal_name
from tfdist.launch.rank_loop import (
    CHILDREN_STEP_S,
    DRAIN_S,
    RankLoop,
)
from tfdist.launch.signals import ENDING, PASSED_ON, Signals, signal_group

_MOST_WAITING_BYTES = 1 << 20  # of unsent data; beyond it, the ranks must wait
_PAUSE_S = agent_protocol.SIGN_OF_LIFE_S / 2
_FLUSH_S = 2.0
_NO_INPUT = (
    "nothing can be read from its standard input; the command that starts it there "
    "must pass on standard input (docker exec -i, kubectl exec -i)"
)


def _explain(text: str) -> None:
    """Writes to standard error, which tfdistrun shows."""
    with contextlib.suppress(OSError):
        print(f"tfdist agent: {text}", file=sys.stderr, flush=True)


@dataclass
class _FrameStream:
    """Packs the output of a rank into frames for tfdistrun."""

    connection: Connection
    kind: bytes
    rank: int

    def feed(self, data: bytes) -> None:
        self.connection.send(agent_protocol.output(self.kind, self.rank, data))

    def end(self) -> None:
        """Does nothing: tfdistrun does not need to know."""


class Agent:
    """Runs the ranks of this host as tfdistrun requests.

    Args:
        connection: the connection to tfdistrun.
        complete: function that adds to the description of the job what tfdistrun did
            not send; None if tfdistrun sends everything, through standard input.
    """

    def __init__(
        self,
        connection: Connection,
        complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._connection = connection
        self._complete = complete
        self._decoder = agent_protocol.Decoder()
        self._connection.send(agent_protocol.GREETING)
        self._loop = RankLoop(
            on_exit=self._on_exit,
            writers=lambda: {connection.writing: self._write} if self._waiting else {},
            must_pause=lambda: self._waiting >= _MOST_WAITING_BYTES,
        )
        self._job: dict[str, Any] = {}
        self._environ: dict[str, str] = {}
        self._bound: list[tuple[int, ...]] = []
        self._stopped: frozenset[int] = frozenset()  # ranks last reported as stopped
        self._guard: processes.Guard | None = None
        self._heard_s = time.monotonic()
        self._told_s = 0.0
        self._finished = False  # tfdistrun has sent "finish"
        self._code = 0  # exit code of the job
        self._children_end_s = 0.0  # until when children may run after "finish"
        self._signalled_s = 0.0  # time of a signal that ends this process; 0: none
        self._signal = 0  # number of that signal
        self._has_everyone = False  # the same signal was sent to the whole job
        # Whether exits of ranks are not reported, because tfdistrun did not request
        # them. It then treats the ranks as lost, together with their host.
        self._silent = False
        self._held: list[dict[str, Any]] = []  # exits of ranks that are not reported
        self._ended = False

    def run(self) -> int:
        """Serves until tfdistrun ends the job, the connection ends, or a signal comes.

        Returns:
            The exit code of the job if tfdistrun ended it; otherwise 128 + N after
            signal N, or 1.
        """
        try:
            self._loop.watch(self._connection.reading, self._read)
        except PermissionError:  # the descriptor is a file, or /dev/null
            _explain(_NO_INPUT)
            return 1
        signals = Signals()
        self._loop.watch(signals, lambda: self._on_signals(signals.take()))
        self._say(
            event="hello",
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=time.monotonic(),
        )
        try:
            while not self._ended:
                ending = self._finished or self._signalled_s
                pause_s = CHILDREN_STEP_S if ending else _PAUSE_S
                self._step(time.monotonic() + pause_s)
                self._run_periodic()
                self._end_if(self._finished and not self._children_go_on())
                self._end_if(self._signalled_s > 0 and not self._must_stay())
        finally:
            self._end_all()
        if self._is_orderly:
            # The streams of a killed rank may close before its process has exited.
            loop = self._loop
            self._run_while(lambda: bool(loop.streams or loop.running), DRAIN_S)
            self._run_while(lambda: self._waiting > 0, _FLUSH_S)
        if self._finished:
            return self._code
        return 128 + self._signal if self._signal else 1

    @property
    def has_finished(self) -> bool:
        """Whether tfdistrun, and not a lost connection or a signal, ended the job."""
        return self._finished

    @property
    def _is_orderly(self) -> bool:
        """Whether the end is orderly: tfdistrun still reads the remaining messages.

        True after tfdistrun's message "finish", and after a signal.
        """
        return self._finished or self._signalled_s > 0

    # ---- the connection ----

    @property
    def _waiting(self) -> int:
        """Number of bytes that are queued for sending."""
        return len(self._connection.waiting)

    def _say(self, **fields: Any) -> None:
        self._connection.send(agent_protocol.message(**fields))

    def _read(self) -> None:
        try:
            data = self._connection.receive()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard_s = time.monotonic()
        if not data and not self._job and self._complete is None:
            _explain(_NO_INPUT)
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame.message)
        except agent_protocol.FrameError:
            data = b""
        self._end_if(not data)

    def _obey(self, message: dict[str, Any]) -> None:
        order = message["do"]
        if order == "prepare":
            self._prepare(message["job"])
        elif order == "go":
            self._start()
        elif order == "signal":
            self._signal_ranks(int(message["number"]))
        elif order == "start":
            self._start_newcomer(message)
        elif order == "kill":
            self._kill(message.get("member"))
        elif order == "prioritize":
            self._loop.prioritize(int(message["member"]))
        elif order == "finish":
            self._finished = True
            self._code = int(message["code"])
            self._children_end_s = time.monotonic() + float(message["children_s"])

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in PASSED_ON:
                self._signal_ranks(number)
            elif not self._signalled_s:
                _explain(f"ended by {signal_name(number)}")
                self._signalled_s, self._signal = time.monotonic(), number
                self._say(event="signalled", number=int(number))
                self._has_everyone = self._loop.asked_s is not None
                if not self._has_everyone:
                    # In an elastic job, tfdistrun needs the exit codes of its ranks.
                    self._silent = not self._job.get("is_elastic", False)
                    self._loop.ask_to_end(number)
            elif time.monotonic() > self._signalled_s + SAME_SIGNAL_S:
                self._ended = True  # a second signal ends immediately

    def _signal_ranks(self, number: int) -> None:
        if number in PASSED_ON:
            self._loop.pass_on(number)
        elif number not in ENDING:
            self._loop.signal(number)
        elif self._signalled_s and not self._has_everyone:
            # A batch system has signaled tfdistrun too, perhaps seconds later. The
            # ranks save already, and a second signal may kill them.
            self._has_everyone = True
            self._silent = False
            while self._held:
                self._say(**self._held.pop(0))
        else:
            self._loop.ask_to_end(number)

    def _must_stay(self) -> bool:
        """Returns whether the agent continues after a signal.

        With --nnodes, if tfdistrun on the first host has received the same signal, the
        agent continues until that tfdistrun ends the job.
        """
        if self._complete is not None:
            if self._has_everyone:
                return True
            if time.monotonic() < self._signalled_s + SAME_SIGNAL_S:
                return True
        return self._ranks_save()

    def _ranks_save(self) -> bool:
        """Returns whether processes are running, and still have time to save."""
        asked_s = self._loop.asked_s or 0.0
        if time.monotonic() >= asked_s + float(self._job.get("signal_grace_s", 0.0)):
            return False
        return bool(self._loop.running) or self._loop.children.are_left()

    def _children_go_on(self) -> bool:
        return (
            self._loop.children.are_left() and time.monotonic() < self._children_end_s
        )

    def _end_if(self, ended: bool) -> None:
        self._ended = self._ended or ended

    def _run_periodic(self) -> None:
        now = time.monotonic()
        if now - self._heard_s > agent_protocol.SILENCE_S:
            self._ended = True
        if now - self._told_s >= agent_protocol.SIGN_OF_LIFE_S:
            self._told_s = now
            if self._waiting < _MOST_WAITING_BYTES:
                self._say(event="alive")
            self._loop.reap()
            self._say_who_is_stopped()

    def _step(self, until_s: float) -> None:
        self._write()
        self._loop.step(until_s)

    def _run_while(self, unfinished: Callable[[], bool], limit_s: float) -> None:
        self._loop.run_while(unfinished, limit_s, self._step)

    def _write(self) -> None:
        try:
            self._connection.flush()
        except OSError:  # the connection is lost
            self._connection.waiting.clear()
            self._ended = True

    # ---- the ranks ----

    def _prepare(self, job: dict[str, Any]) -> None:
        self._job = job = job if self._complete is None else self._complete(job)
        environ = rank_environ(os.environ, job["environ"], job["path"])
        try:
            warnings = prepare(job, environ)
            self._bound = binding.here(int(job["slots"]), job["bind_to"])
        except (PrepareError, binding.BindingError) as error:
            self._say(event="error", text=str(error), code=getattr(error, "code", 2))
            return
        _, path = keep_in_memory(bytes.fromhex(job["secret"]))
        self._environ = {
            **environ,
            processes.JOB_TAG_VARIABLE: job["job_tag"],
            "TFDIST_SECRET_FILE": path,
            "TFDIST_RENDEZVOUS": job["store"],
        }
        self._heard_s = time.monotonic()  # the checks may have taken a while
        self._say(
            event="ready",
            warnings=warnings,
            bound=self._bound,
            threads=environ.get(binding.THREADS, ""),
        )

    def _start(self) -> None:
        if self._signalled_s:
            return  # ranks started now would not receive that signal
        processes.adopt_orphans()
        self._guard = processes.Guard(self._job["job_tag"])
        self._loop.guard_with(self._guard)
        for told in self._job["ranks"]:
            try:
                self._start_one(int(told["rank"]), told)
            except OSError as error:
                self._say(event="error", text=f"cannot start a rank: {error}", code=1)
                return

    def _start_one(self, member: int, told: Mapping[str, Any]) -> None:
        """Starts a process.

        Args:
            member: number of the process.
            told: "variables" and "slot" of the process, "terminal_columns", and for a
                newcomer "in_background".

        Raises:
            OSError: no process or descriptor is available.
        """
        processors = None
        if self._job["bind_to"] != "none":
            processors = binding.of_slot(self._bound, int(told["slot"]))
        self._loop.start(
            member,
            _FrameStream(self._connection, agent_protocol.STDOUT, member),
            _FrameStream(self._connection, agent_protocol.STDERR, member),
            command=self._job["command"],
            environ={**self._environ, **told["variables"]},
            terminal_columns=told["terminal_columns"],
            processors=processors,
            is_elastic=self._job["is_elastic"],
            in_background=bool(told.get("in_background")),
        )
        pid = self._loop.running[member].process.pid
        self._say(event="started", rank=member, pid=pid)

    def _start_newcomer(self, message: Mapping[str, Any]) -> None:
        """Starts one more process of an elastic job."""
        member = int(message["member"])
        if self._signalled_s:
            self._on_exit(member, EXIT_CODE)
            return
        try:
            self._start_one(member, message)
        except OSError as error:
            _explain(f"cannot start a rank: {error}")
            self._on_exit(member, 1)

    def _kill(self, member: int | None) -> None:
        """Kills a process and its children; if `member` is None, the whole job."""
        if member is None:
            self._loop.kill()
        elif started := self._loop.running.get(member):
            signal_group(started.process.pid, signal.SIGKILL)

    def _on_exit(self, rank: int, code: int) -> None:
        end = {
            "event": "end",
            "rank": rank,
            "code": code,
            "time_s": time.monotonic(),
            "memory_bytes": processes.memory_of_children(),
        }
        if self._silent:
            self._held.append(end)
        else:
            self._say(**end)

    def _say_who_is_stopped(self) -> None:
        if (stopped := self._loop.stopped()) != self._stopped:
            self._stopped = stopped
            self._say(event="stopped", ranks=sorted(stopped))

    def _end_all(self) -> None:
        """Terminates all processes of the job on this host."""
        self._loop.forget(self._connection.reading)  # later messages have no effect
        if self._guard is None:
            return
        # If the connection is lost, tfdistrun treats the ranks of this host as lost.
        self._silent = self._silent or not self._is_orderly
        self._loop.end_leftovers(self._step)
        self._guard.dismiss()


def main() -> int:
    """Runs the agent; writes errors to standard error, which ssh passes on."""
    # Output of a rank or a library must not get between the frames.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(answers, False)
    try:
        return Agent(Connection(0, answers)).run()
    except (OSError, native.CoreError) as error:
        _explain(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
