"""Starts the processes of ranks; finds and kills every process of a job.

Each rank has its own process group, but a process of the job may leave the group and
lose its parent. The processes of a job are therefore found in two ways: as descendants
of this process, and by the job tag in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from tfdist.core import allocator
from tfdist.launch import _standalone
from tfdist.launch._standalone import JOB_TAG_VARIABLE, tagged_processes

_FEWEST_COLUMNS = 20
_MOST_CELLS = (1 << 16) - 1  # maximum number of columns, or rows, of a terminal
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 3.0
_PAUSE_S = 0.01


def standalone(program: str) -> list[str]:
    """Returns the command line of a `_standalone` program, without its arguments."""
    script = Path(_standalone.__file__)
    return [sys.executable, "-I", "-S", str(script), program]


# ---- starting ranks ----


@dataclass
class RankProcess:
    """A started rank.

    Attributes:
        rank: number of the rank.
        process: the process; its `pid` is also the ID of its process group.
        pidfd: descriptor that becomes readable when the process exits.
        stdout: descriptor from which the rank's standard output is read.
        stderr: descriptor from which the rank's standard error is read.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    stdout: int
    stderr: int


def _terminal(columns: int) -> tuple[int, int]:
    """Opens a pseudo terminal that changes no bytes; returns our end and the rank's."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # no "\n" → "\r\n"
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    lines = min(shutil.get_terminal_size().lines, _MOST_CELLS)
    columns = min(max(_FEWEST_COLUMNS, columns), _MOST_CELLS)
    size = struct.pack("HHHH", lines, columns, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


def start_rank(
    rank: int,
    command: list[str],
    environ: dict[str, str],
    *,
    terminal_columns: int | None,
    processors: Sequence[int] | None = None,
    has_own_session: bool = False,
) -> RankProcess:
    """Starts one rank. Call it from the main thread, which must outlive the rank.

    Args:
        rank: number of the rank.
        command: program and arguments.
        environ: environment variables of the rank; those of `allocator` are added.
        terminal_columns: width of the pseudo terminal to which the rank writes its
            standard output; None for a pipe.
        processors: IDs of the CPUs that the rank may use; None for the CPUs that this
            process may use.
        has_own_session: whether the rank leads a session of its own, not only a process
            group.

    Raises:
        OSError: no process or descriptor is available.
    """
    if terminal_columns is None:
        stdout, their_stdout = os.pipe()
    else:
        stdout, their_stdout = _terminal(terminal_columns)
    stderr, their_stderr = os.pipe()
    bound = ",".join(map(str, processors or ()))
    try:
        process = subprocess.Popen(
            [*standalone("exec"), str(os.getpid()), bound, *command],
            stdin=subprocess.DEVNULL,
            stdout=their_stdout,
            stderr=their_stderr,
            env={**environ, **allocator.settings(environ)},
            process_group=None if has_own_session else 0,
            start_new_session=has_own_session,
        )
    except OSError:
        os.close(stdout)
        os.close(stderr)
        raise
    finally:
        os.close(their_stdout)
        os.close(their_stderr)
    os.set_blocking(stdout, False)
    os.set_blocking(stderr, False)
    return RankProcess(
        rank=rank,
        process=process,
        pidfd=os.pidfd_open(process.pid),
        stdout=stdout,
        stderr=stderr,
    )


class Guard:
    """A process that kills the processes of the job if this process is killed.

    Args:
        job_tag: value of JOB_TAG_VARIABLE in the environment of the job's processes.
    """

    def __init__(self, job_tag: str) -> None:
        self.job_tag = job_tag
        self._process = subprocess.Popen(
            [*standalone("guard"), job_tag],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        """Process id of the guard itself."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Adds the process group of a new rank."""
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            stdin.write(b"%d\n" % group)

    def dismiss(self) -> None:
        """Tells the guard to exit, because all processes of the job have exited."""
        try:
            self._process.communicate(b"x", timeout=2.0)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(2.0)


# ---- processes that do not belong to the job ----

# Process IDs of such processes that are running. The lock ensures that a process is
# listed here before `reap_orphans` can see that it has exited: reaping it would lose
# its exit code.
_outsiders: set[int] = set()
_outsiders_lock = threading.Lock()


def start_outsider(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process that does not belong to the job, in a group of its own.

    The output of the process comes through pipes. Call `end_outsider` afterwards. May
    be called from any thread.

    Raises:
        OSError: the process cannot be started.
    """
    with _outsiders_lock:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        _outsiders.add(process.pid)
        return process


def end_outsider(process: subprocess.Popen[bytes], *, grace_s: float = 0.0) -> int:
    """Waits until a process exits; kills its process group after `grace_s` seconds.

    Returns:
        The exit code of the process; -9 if it was killed.
    """
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    with _outsiders_lock:
        _outsiders.discard(process.pid)
    return code


# ---- all processes of a job ----

# Descendants of this process from before adopt_orphans: a shell that replaced itself
# with this program may have started some (`> >(tee log)`, `service & exec tfdistrun`).
_strangers: set[psutil.Process] = set()


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents exit.

    Descendants that exist already, and theirs, do not belong to the job.
    """
    _strangers.update(psutil.Process().children(recursive=True))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def memory_of_children() -> int:
    """Returns the largest peak memory in bytes among descendants that have exited."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def job_processes(job_tag: str, *, excluded_pids: Collection[int]) -> list[int]:
    """Returns the job's processes: descendants of this process, and tagged processes.

    Args:
        job_tag: value of JOB_TAG_VARIABLE in the environment of the job's processes.
        excluded_pids: children that, with their descendants, do not belong to the job
            (the guard, ssh).
    """
    found = set(tagged_processes(job_tag))
    children = psutil.Process().children()
    with _outsiders_lock:
        excluded_pids = {*excluded_pids, *_outsiders}
    for child in children:
        if child.pid not in excluded_pids and child not in _strangers:
            found.add(child.pid)
            found |= {below.pid for below in _below(child)}
    return [pid for pid in sorted(found) if pid not in excluded_pids and _runs(pid)]


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def send_signal(pids: Collection[int], number: int) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(
    job_tag: str, *, excluded_pids: Collection[int], waited_pids: Collection[int] = ()
) -> list[int]:
    """Kills the processes of the job until none is left.

    Args:
        job_tag: as for `job_processes`.
        excluded_pids: as for `job_processes`.
        waited_pids: children whose exit codes are still to be read by their Popen
            objects.

    Returns:
        Processes that still exist after 3 s, for example blocked in the kernel.
    """
    own = {*excluded_pids, *waited_pids}
    deadline = time.monotonic() + _KILL_LIMIT_S
    while (
        pids := job_processes(job_tag, excluded_pids=excluded_pids)
    ) and time.monotonic() < deadline:
        send_signal(pids, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        reap_orphans(own)
    reap_orphans(own)
    return pids


def reap_orphans(own: Collection[int]) -> None:
    """Reaps adopted children that have exited, except those with a Popen object.

    A Popen object reports exit code 0 if its child was reaped elsewhere.

    Args:
        own: IDs of the children that have a Popen object.
    """
    children = psutil.Process().children()
    with _outsiders_lock:
        own = {*own, *_outsiders}
    for child in children:
        try:
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


__all__ = [
    "JOB_TAG_VARIABLE",
    "Guard",
    "RankProcess",
    "adopt_orphans",
    "end_outsider",
    "job_processes",
    "kill_all",
    "memory_of_children",
    "reap_orphans",
    "send_signal",
    "standalone",
    "start_outsider",
    "start_rank",
]
