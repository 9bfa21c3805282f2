"""Communication with the agent that runs the ranks on another host.

There is one connection per host (`connection`). With ssh, the line for the remote shell
only starts `agent`, so that little has to be quoted; the job is sent through standard
input.
"""

from __future__ import annotations

import os
import selectors
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.core.version import __version__
from tfdist.launch import agent_protocol
from tfdist.launch.connection import AgentConnection
from tfdist.launch.failure_summary import signal_name
from tfdist.launch.hosts import Host
from tfdist.launch.signals import PASSED_ON, Signals

# The user's configuration of ssh decides whether hosts with unknown keys are accepted.
# ssh must not ask for input, since nobody could answer. It ends a dead connection after
# 15 s. It does not become the master of a shared connection, which would end with this
# job although other jobs may use it.
SSH_COMMAND = (
    "ssh -x -T -o BatchMode=yes -o ControlMaster=no -o ConnectTimeout=10 "
    "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)
_READ_BYTES = 64 << 10
_SAID_LINES = 10
KILL_LIMIT_S = 5.0  # for an agent to confirm that it has killed a rank
KILL_MIN_S = 1.0  # the same, for an agent that has been silent for KILL_LIMIT_S
_ROUND_S = 1.0
_HINTS = (
    (
        "Host key verification failed",
        "connect once manually, `ssh {host} true`, and check the key that it shows",
    ),
    (
        "Permission denied",
        "`ssh {host} true` must work without a password: put your public key "
        "into that host's ~/.ssh/authorized_keys (ssh-copy-id {host})",
    ),
    ("Could not resolve hostname", "is the name right?"),
    (
        "No module named",
        "install the same tfdist on that host, for the same python: {python}",
    ),
    (
        "No such file or directory",
        "tfdistrun starts {python} there: the same environment must be at the same "
        "path on all hosts",
    ),
    ("not found", "tfdistrun starts {python} there: install it at the same path"),
)


def remote_line(python: str, python_path: str | None) -> str:
    """Returns the line for the shell of the other host.

    Args:
        python: path of the interpreter, the same on all hosts.
        python_path: PYTHONPATH for the agent; None to use the PYTHONPATH of the other
            host. Relative folders are relative to this process's working directory.

    Example:
        >>> from tfdist.launch import remote
        >>> remote.remote_line("/opt/my env/python", None)
        "exec '/opt/my env/python' -P -m tfdist.launch.agent"
    """
    words = [python, "-P", "-m", "tfdist.launch.agent"]
    if python_path:
        folders = [os.path.abspath(p) for p in python_path.split(os.pathsep) if p]
        words = ["env", "PYTHONPATH=" + os.pathsep.join(folders), *words]
    return "exec " + shlex.join(words)


@dataclass(frozen=True)
class End:
    """Exit of a rank; `lost` says why its exit code is unknown, or is ""."""

    rank: int
    code: int
    time_s: float
    lost: str = ""


@dataclass(frozen=True)
class Started:
    """Start of a rank's process."""

    rank: int
    pid: int


Event = agent_protocol.Frame | Started | End


class RemoteHost:
    """The connection to one host's agent.

    In an elastic job, the member number of a process takes the place of its rank.

    Args:
        host: the host.
        ranks: ranks to start on the host at the start of the job.
        connection: the connection to the agent.
        number: number of the host in the job.
    """

    def __init__(
        self,
        host: Host,
        ranks: Sequence[int],
        connection: AgentConnection,
        number: int = 0,
    ) -> None:
        self.host = host
        self.connection = connection
        self.ranks = list(ranks)
        self.number = number
        self.state = "connecting"  # then "greeted", "ready", "running", "closed"
        self.failure = ""  # why the ranks cannot be started on that host
        self.failure_code = 1
        self.lost = ""  # why the connection has ended although ranks may run there
        self.warnings: list[str] = []
        self.bound: list[list[int]] = []  # CPU IDs of each slot of the host
        self.threads = ""  # value of binding.THREADS for the host's ranks
        self.memory_bytes = 0  # largest peak memory of a process there
        self.clock_s = 0.0  # this host's clock minus that host's clock
        self._job: dict[str, Any] = {}
        self.stopped: frozenset[int] = frozenset()  # ranks that got SIGSTOP
        self.is_leaving = False  # a signal ends the agent
        self._is_finishing = False  # the agent was told to terminate all processes
        self._end_reason = ""  # why the connection ends, if known before it ends
        self._left = set(ranks)
        self._kills_s: dict[int, float] = {}  # rank → time of the request to kill it
        self._save_ends_s = 0.0  # after a signal to the agent: when time to save ends
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._decoder = agent_protocol.Decoder(agent_protocol.GREETING)
        self._heard_s = time.monotonic()
        self._told_s = time.monotonic()

    # ---- to the agent ----

    def send(self, **fields: Any) -> None:
        """Queues a message."""
        if self.state != "closed":
            self.connection.send(agent_protocol.message(**fields))
            self._told_s = time.monotonic()
            self.write()

    def prepare(self, job: dict[str, Any]) -> None:
        """Stores the job, which is sent to the agent after its greeting.

        Before the greeting, the other end may be a terminal, which would show the
        secret.
        """
        self._job = job

    def go(self) -> None:
        """Lets the agent start the ranks."""
        self.state = "running"
        self._heard_s = time.monotonic()
        self.send(do="go")

    def start(self, rank: int, **told: Any) -> None:
        """Lets the agent start one more process.

        Args:
            rank: member number of the process.
            told: further fields of the message; see `Agent._start_one`.
        """
        self._left.add(rank)
        self.send(do="start", member=rank, **told)

    def kill_rank(self, rank: int) -> None:
        """Lets the agent kill a rank; without its confirmation, the host is lost."""
        if rank in self._left and rank not in self._kills_s:
            self._kills_s[rank] = time.monotonic()
            self.send(do="kill", member=rank)

    def prioritize(self, rank: int) -> None:
        """Lets the agent give a process the same share of the CPUs as the ranks."""
        self.send(do="prioritize", member=rank)

    def finish(self, children_s: float = 0.0, code: int = 0) -> None:
        """Lets the agent terminate all processes of the job, and then exit.

        Args:
            children_s: seconds for which children of the ranks may continue to run.
            code: exit code of the job.
        """
        self._is_finishing = True
        self.send(do="finish", children_s=children_s, code=code)

    @property
    def wants_write(self) -> bool:
        """Whether data is waiting to be written."""
        return bool(self.connection.waiting) and self.state != "closed"

    def write(self) -> None:
        """Writes queued data; a broken connection is noticed at the next read."""
        if self.state == "closed":
            return
        try:
            self.connection.flush()
        except OSError:
            self.connection.waiting.clear()

    @property
    def saves(self) -> bool:
        """Whether the agent received a signal and gives its ranks time to save."""
        return self.state != "closed" and time.monotonic() < self._save_ends_s

    def heard(self) -> None:
        """Restarts the time limits for silence, while the caller does not read."""
        self._heard_s = time.monotonic()
        self._kills_s = dict.fromkeys(self._kills_s, self._heard_s)

    def run_periodic(self) -> list[End]:
        """Sends a sign of life; closes the connection if the agent is silent too long.

        Returns:
            Ranks that are lost with the connection.
        """
        now = time.monotonic()
        if self.state == "closed":
            return []
        if now - self._told_s >= agent_protocol.SIGN_OF_LIFE_S and not self.wants_write:
            self.send(do="ping")
        if self.state == "running" and now - self._heard_s > agent_protocol.SILENCE_S:
            return self.close(
                f"nothing was received from it for {agent_protocol.SILENCE_S:g} s"
            )
        if self._kills_s and now > self._kill_deadline_s():
            return self.close("its agent did not confirm that a process was killed")
        return []

    def _kill_deadline_s(self) -> float:
        """Returns the time by which the agent must have confirmed the first kill.

        A host that has been silent has less time, since it may already have been lost
        before the request.
        """
        asked_s = min(self._kills_s.values())
        silent_s = max(asked_s + KILL_MIN_S, self._heard_s + KILL_LIMIT_S)
        return min(asked_s + KILL_LIMIT_S, silent_s)

    # ---- from the agent ----

    def read(self) -> list[Event]:
        """Returns the events that the agent has sent: output, starts and exits."""
        try:
            data = self.connection.receive()
        except BlockingIOError:
            return []
        except OSError as error:
            why = self._end_reason or f"its connection broke: {error}"
            return list(self.close(why))
        if not data:
            return list(self.close())
        self._heard_s = time.monotonic()
        found: list[Event] = []
        try:
            for frame in self._decoder.feed(data):
                if frame.kind == agent_protocol.MESSAGE:
                    found += self._message(frame.message)
                else:
                    found.append(frame)
        except (agent_protocol.FrameError, KeyError, TypeError, ValueError) as error:
            found += self.close(f"it sent data that is not from tfdist: {error}")
        return found

    def _message(self, message: dict[str, Any]) -> Sequence[Started | End]:
        event = message["event"]
        if event == "hello":
            self.clock_s = time.monotonic() - float(message["time_s"])
            self.state = "greeted"
            if message["version"] != __version__:
                self.failure = (
                    f"tfdist {message['version']} is installed there, {__version__} "
                    "here; install the same version on all hosts"
                )
            else:
                self.send(do="prepare", job=self._job)
        elif event == "ready":
            self.warnings = [str(text) for text in message["warnings"]]
            self.bound = [list(processors) for processors in message["bound"]]
            self.threads = str(message["threads"])
            self.state = "ready"
        elif event == "error":
            self.failure = str(message["text"])
            self.failure_code = int(message["code"])
            if self.state == "running":
                return self.close(self.failure)
        elif event == "signalled":
            self._save_ends_s = time.monotonic() + self._job["signal_grace_s"]
            self.is_leaving = True
            if self.connection.errors is None:  # else its stderr shows the reason
                name = signal_name(int(message["number"]))
                self._end_reason = f"tfdistrun was ended by {name} there"
        elif event == "started":
            return [Started(int(message["rank"]), int(message["pid"]))]
        elif event == "stopped":
            self.stopped = frozenset(int(rank) for rank in message["ranks"])
        elif event == "end":
            rank = int(message["rank"])
            if rank in self._left:
                self._left.discard(rank)
                self._kills_s.pop(rank, None)
                self.memory_bytes = int(message["memory_bytes"])
                at_s = float(message["time_s"]) + self.clock_s
                return [End(rank, int(message["code"]), at_s)]
        return []

    def read_said(self) -> list[str]:
        """Returns lines from the command's standard error, such as ssh's messages."""
        if self.connection.errors is None:
            return []
        try:
            data = os.read(self.connection.errors, _READ_BYTES)
        except BlockingIOError:
            return []
        lines = data.decode("utf-8", "replace").splitlines()
        self._said.extend(line.rstrip() for line in lines if line.strip())
        return lines

    # ---- the end ----

    def close(self, why: str = "") -> list[End]:
        """Closes the connection; ranks of the host that have not exited are lost.

        Args:
            why: reason for the message; "" if the connection has ended by itself.

        Returns:
            The lost ranks.
        """
        if self.state == "closed":
            return []
        how = self.connection.wait()
        self.read_said()
        started = self.state == "running"
        self.state = "closed"
        self.connection.close()
        why = why or self._end_reason or f"its connection ended{how}"
        why += self._what_it_said()
        if not started and not self.failure:
            self.failure = f"tfdist could not be started there: {why}"
        left, self._left = sorted(self._left), set()
        now = time.monotonic()
        lost = f"{self.host.name} was lost: {why}"
        if started and not self._is_finishing:
            self.lost = lost
        return [End(rank, 255, now, lost) for rank in left]

    def _what_it_said(self) -> str:
        noise = self._decoder.noise.decode("utf-8", "replace").splitlines()
        said = [*([] if self._decoder.greeted else noise[-3:]), *self._said]
        if not said:
            return ""
        text = f"; it said: {' / '.join(said)[-1000:]}"
        for part, advice in _HINTS:
            if part in text:
                advice = advice.format(host=self.host.name, python=sys.executable)
                return f"{text}\n  {advice}"
        return text

    def time_out(self, limit_s: float) -> None:
        """Ends a connection whose agent takes too long to be ready."""
        self._end_reason = f"no answer within {limit_s:g} s (--host-timeout-s)"
        self.connection.interrupt()

    def kill(self, code: int = 1) -> None:
        """Ends the connection; the agent then terminates the ranks.

        Args:
            code: exit code of the job, for an agent that is a tfdistrun (--nnodes).
        """
        if self.state == "closed":
            return
        if self.connection.errors is None and not self._is_finishing:
            self.finish(code=code)
        self.connection.kill()


def prepare_all(
    remotes: Sequence[RemoteHost],
    signals: Signals,
    *,
    timeout_s: float,
) -> int | None:
    """Waits until every host is ready to start its ranks, or a host fails.

    Args:
        remotes: the connections; after a failure, `RemoteHost.failure` gives the cause.
        signals: signals of this process, which end the wait.
        timeout_s: time limit in seconds for all hosts together.

    Returns:
        The number of the signal that ended the wait; None if there was none.
    """
    deadline = time.monotonic() + timeout_s
    selector = selectors.DefaultSelector()
    try:
        for remote in remotes:
            own = remote.connection
            for fd, act in (
                (own.reading, remote.read),
                (own.errors, remote.read_said),
            ):
                if fd is not None:
                    selector.register(fd, selectors.EVENT_READ, (remote, act))
        selector.register(signals, selectors.EVENT_READ)
        waiting = list(remotes)
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                for remote in waiting:
                    remote.time_out(timeout_s)
                    remote.close()
                return None
            for remote in remotes:  # hosts that are ready wait for the others
                remote.run_periodic()
                fd = remote.connection.writing
                if remote.wants_write and fd not in selector.get_map():
                    waits = (remote, remote.write)
                    selector.register(fd, selectors.EVENT_WRITE, waits)
            _round(selector, min(left_s, _ROUND_S))
            # SIGUSR1 and SIGUSR2 have no receiver yet, and do not end the job.
            if numbers := [n for n in signals.take() if n not in PASSED_ON]:
                return numbers[0]
            if any(remote.failure for remote in remotes):
                _collect(waiting, selector)
                return None
            waiting = [remote for remote in waiting if remote.state != "ready"]
        return None
    finally:
        selector.close()


def _round(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Reads and writes once; unregisters descriptors that need no more waiting."""
    for key, _ in selector.select(timeout_s):
        if key.data is None:  # a signal
            continue
        remote, act = key.data
        if remote.state == "closed":
            continue
        found = act()
        own = remote.connection
        done = {
            own.writing: not remote.wants_write,
            own.errors: not found,  # end of stderr: the command is about to exit
        }
        for fd in (own.writing, own.reading, own.errors):
            over = remote.state == "closed" or (fd == key.fd and done.get(fd, False))
            if over and fd is not None and fd in selector.get_map():
                selector.unregister(fd)


def _collect(waiting: Sequence[RemoteHost], selector: selectors.BaseSelector) -> None:
    """Waits up to 0.5 s, so that hosts that fail together are reported together."""
    deadline = time.monotonic() + 0.5
    while (left_s := deadline - time.monotonic()) > 0:
        if all(remote.failure or remote.state == "ready" for remote in waiting):
            return
        _round(selector, left_s)
