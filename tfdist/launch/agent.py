"""Starts and supervises the ranks of a remote host for tfdistrun.

`python -m tfdist.launch.agent` is started through ssh. It receives everything through
its standard input (the secret is not in an argument). It sends the ranks' output and
exit codes through its standard output (`agent_protocol`). When its input closes,
because tfdistrun was killed or the connection ended, it ends all processes it has
started. If nothing arrives for 30 s, not even tfdistrun's sign of life, the connection
is considered dead. After a signal to the agent itself, the ranks have as much time to
save as after a signal to tfdistrun. A guard process ends the ranks if the agent itself
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.secret import keep_in_memory
from tfdist.core.rendezvous.store import StoreClient
from tfdist.core.term_signal import EXIT_CODE, SAME_SIGNAL_S
from tfdist.core.version import __version__
from tfdist.launch import agent_protocol, binding, preflight, processes
from tfdist.launch.failure_summary import signal_name
from tfdist.launch.rank_loop import (
    CHILDREN_STEP_S,
    DRAIN_S,
    READ_BYTES,
    RankLoop,
)
from tfdist.launch.signals import ENDING, PASSED_ON, Signals, signal_group

_MOST_WAITING_BYTES = 1 << 20  # for the network; beyond it, the ranks must wait
_PAUSE_S = agent_protocol.SIGN_OF_LIFE_S / 2
_FLUSH_S = 2.0
_STORE_S = 5.0
_NO_INPUT = (
    "nothing can be read from its standard input; the command that starts it there "
    "must pass on standard input (docker exec -i, kubectl exec -i)"
)


class PrepareError(Exception):
    """The ranks cannot be started on this host; `code` is tfdistrun's exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def rank_environ(
    own: Mapping[str, str], given: Mapping[str, str], path: str
) -> dict[str, str]:
    """Returns the environment variables of all ranks of this host.

    Args:
        own: this host's variables, as ssh provides them.
        given: variables from tfdistrun, which take precedence. TFDIST_* variables are
            used only if tfdistrun provides them.
        path: tfdistrun's PATH, which is put in front of this host's.

    Example:
        >>> from tfdist.launch import agent
        >>> agent.rank_environ({"PATH": "/bin", "TFDIST_RANK": "7"}, {"A": "b"}, "/x")
        {'PATH': '/x:/bin', 'A': 'b'}
    """
    kept = {k: v for k, v in own.items() if not k.startswith("TFDIST_")}
    folders = [*path.split(os.pathsep), *own.get("PATH", "").split(os.pathsep)]
    kept["PATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    return {**kept, **given}


def prepare(job: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Changes to the job's folder and checks everything that the ranks will need.

    Returns:
        Warnings.

    Raises:
        PrepareError: something is missing on this host.
    """
    folder, command = job["cwd"], job["command"][0]
    try:
        os.chdir(folder)
    except OSError as error:
        raise PrepareError(
            f"the working directory {folder} cannot be entered there: "
            f"{error.strerror}; tfdistrun starts all ranks in its own working "
            "directory: create it on all hosts, or use a shared file system"
        ) from None
    if shutil.which(command, path=environ["PATH"]) is None:
        raise PrepareError(
            f"{command}: command not found there (PATH={environ['PATH']}); install the "
            "same programs on all hosts, or give the path",
            127,
        )
    own = min(int(job["slots"]), int(job["size"]))
    found = preflight.check(
        own,
        shm_bytes=job["shm_bytes"],
        world=job["size"],
        served=own,
        at_start=len(job["ranks"]),
    )
    if found.errors:
        raise PrepareError("; ".join(found.errors))
    try:
        asyncio.run(_reach_store(job))
    except RendezvousError as error:
        raise PrepareError(
            f"tfdistrun cannot be reached from there at {job['store']}: "
            f"{error.message}; choose the network with TFDIST_ADDRESS (an address, a "
            "network or an interface), and make sure that no firewall blocks it"
        ) from None
    return found.warnings


async def _reach_store(job: Mapping[str, Any]) -> None:
    client = await StoreClient.connect(
        split_address(job["store"]),
        bytes.fromhex(job["secret"]),
        deadline=time.monotonic() + _STORE_S,
        job=job["environ"]["TFDIST_JOB_ID"],
    )
    client.close()


def _explain(text: str) -> None:
    """Writes to standard error, which tfdistrun shows."""
    with contextlib.suppress(OSError):
        print(f"tfdist agent: {text}", file=sys.stderr, flush=True)


@dataclass
class _FrameStream:
    """Packs the output of a rank into frames for tfdistrun."""

    frames: bytearray
    kind: bytes
    rank: int

    def feed(self, data: bytes) -> None:
        self.frames += agent_protocol.output(self.kind, self.rank, data)

    def end(self) -> None:
        """Does nothing: tfdistrun does not need to know."""


class Agent:
    """Runs the ranks of this host as tfdistrun requests.

    Args:
        commands: descriptor from which tfdistrun's messages are read.
        answers: descriptor to which frames are written.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._decoder = agent_protocol.Decoder()
        self._out = bytearray(agent_protocol.GREETING)
        self._loop = RankLoop(
            on_exit=self._on_exit,
            writers=lambda: {self._answers: self._write} if self._out else {},
            must_pause=lambda: len(self._out) >= _MOST_WAITING_BYTES,
        )
        self._job: dict[str, Any] = {}
        self._environ: dict[str, str] = {}
        self._bound: list[tuple[int, ...]] = []
        self._stopped: frozenset[int] = frozenset()  # ranks, as reported
        self._guard: processes.Guard | None = None
        self._heard_s = time.monotonic()
        self._told_s = 0.0
        self._finished = False  # tfdistrun ended the job; else the connection is lost
        self._children_end_s = 0.0  # how long children may run when the job is finished
        self._signalled_s = 0.0  # time of a signal that ends this process; 0: none
        self._silent = False  # tfdistrun did not request the end: the host is lost
        self._ended = False

    def run(self) -> int:
        """Serves until tfdistrun ends the job or is gone."""
        for fd in (self._commands, self._answers):
            os.set_blocking(fd, False)
        try:
            self._loop.watch(self._commands, self._read)
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
                self._end_if(self._signalled_s > 0 and not self._ranks_save())
        finally:
            self._end_all()
        if self._is_orderly:
            # The streams of a rank that was just killed may close before it has ended.
            loop = self._loop
            self._run_while(lambda: bool(loop.streams or loop.running), DRAIN_S)
            self._run_while(lambda: bool(self._out), _FLUSH_S)
        return 0 if self._finished else 1

    @property
    def _is_orderly(self) -> bool:
        """Returns whether the end was requested, so that tfdistrun reads the rest."""
        return self._finished or self._signalled_s > 0

    # ---- the connection ----

    def _say(self, **fields: Any) -> None:
        self._out += agent_protocol.message(**fields)

    def _read(self) -> None:
        try:
            data = os.read(self._commands, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard_s = time.monotonic()
        if not data and not self._job:
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
        elif order == "finish":
            self._finished = True
            self._children_end_s = time.monotonic() + float(message["children_s"])

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in PASSED_ON:
                self._signal_ranks(number)
            elif not self._signalled_s:
                _explain(f"ended by {signal_name(number)}")
                self._signalled_s = time.monotonic()
                self._say(event="signalled")
                if self._loop.asked_s is None:  # otherwise tfdistrun has asked
                    # In an elastic job, tfdistrun needs the exit codes of its ranks.
                    self._silent = not self._job.get("is_elastic", False)
                    self._signal_ranks(number)
            elif time.monotonic() > self._signalled_s + SAME_SIGNAL_S:
                self._ended = True  # a second signal ends immediately

    def _signal_ranks(self, number: int) -> None:
        if number in PASSED_ON:
            self._loop.pass_on(number)
        elif number not in ENDING:
            self._loop.signal(number)
        elif self._signalled_s and self._loop.is_repeated():
            self._silent = False  # a batch system has signalled tfdistrun too
        else:
            self._loop.ask_to_end(number)

    def _ranks_save(self) -> bool:
        """Returns whether a process that may still save after the signal is running."""
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
            if len(self._out) < _MOST_WAITING_BYTES:
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
            while self._out:
                del self._out[: os.write(self._answers, self._out[:READ_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # the connection is lost
            self._out.clear()
            self._ended = True

    # ---- the ranks ----

    def _prepare(self, job: dict[str, Any]) -> None:
        self._job = job
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
            return  # they would not receive that signal any more
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
            member: its number.
            told: its variables, its slot, and the columns of the terminal.

        Raises:
            OSError: no process or descriptor is available.
        """
        processors = None
        if self._job["bind_to"] != "none":
            processors = binding.of_slot(self._bound, int(told["slot"]))
        self._loop.start(
            member,
            _FrameStream(self._out, agent_protocol.STDOUT, member),
            _FrameStream(self._out, agent_protocol.STDERR, member),
            command=self._job["command"],
            environ={**self._environ, **told["variables"]},
            terminal_columns=told["terminal_columns"],
            processors=processors,
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
        """Kills a process and its children; None: every process of the job."""
        if member is None:
            self._loop.kill()
        elif started := self._loop.running.get(member):
            signal_group(started.process.pid, signal.SIGKILL)

    def _on_exit(self, rank: int, code: int) -> None:
        if not self._silent:
            self._say(
                event="end",
                rank=rank,
                code=code,
                time_s=time.monotonic(),
                memory_bytes=processes.memory_of_children(),
            )

    def _say_who_is_stopped(self) -> None:
        if (stopped := self._loop.stopped()) != self._stopped:
            self._stopped = stopped
            self._say(event="stopped", ranks=sorted(stopped))

    def _end_all(self) -> None:
        """Ends everything that was started on this host."""
        self._loop.forget(self._commands)  # later messages have no effect
        if self._guard is None:
            return
        # To tfdistrun, the ranks of a lost connection are lost too.
        self._silent = self._silent or not self._is_orderly
        self._loop.end_leftovers(self._step)
        self._guard.dismiss()


def main() -> int:
    """Runs the agent; errors are written to standard error, through ssh."""
    # The output of a rank or a library must not get between the frames.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(answers, False)
    try:
        return Agent(0, answers).run()
    except (OSError, native.CoreError) as error:
        _explain(str(error))
        return 1


__all__ = ["Agent", "PrepareError", "main", "prepare", "rank_environ"]

if __name__ == "__main__":
    sys.exit(main())
