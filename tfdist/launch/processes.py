"""Starts the process of a rank; finds and ends every process of a job.

Each rank is in a process group of its own, but processes of the job may have left it,
and their parents: they are found as descendants of this process, and by the job tag in
their environment.
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
_MOST_CELLS = (1 << 16) - 1  # of a line, or lines, that a terminal can have
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 3.0
_PAUSE_S = 0.01


def standalone(program: str) -> list[str]:
    """The command line of a program of `_standalone`, without its arguments."""
    script = Path(_standalone.__file__)
    return [sys.executable, "-I", "-S", str(script), program]


# ---- starting ranks ----


@dataclass
class RankProcess:
    """A started rank.

    Attributes:
        rank: its index.
        process: of which `pid` is also the id of its process group.
        pidfd: becomes readable when the process ends.
        stdout: descriptor from which its standard output is read.
        stderr: the same for its standard error.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    stdout: int
    stderr: int


def _terminal(columns: int) -> tuple[int, int]:
    """A pseudo terminal that passes bytes as they are; (our end, the rank's end)."""
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
) -> RankProcess:
    """Starts one rank. Must be called by the main thread, which outlives it.

    Args:
        rank: its index.
        command: program and arguments.
        environ: all variables of the rank, but for those of `allocator`.
        terminal_columns: gives the rank a terminal of this width as its standard
            output; None: a pipe.
        processors: numbers of those that it may use; None: all that this process may.

    Raises:
        OSError: no process or descriptor left.
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
            process_group=0,
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
    """A process that ends the job's processes if this one is killed.

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
        """Has it look after a process group, too, which was just made for a rank."""
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            stdin.write(b"%d\n" % group)

    def dismiss(self) -> None:
        """Everything has been ended; the guard goes."""
        try:
            self._process.communicate(b"x", timeout=2.0)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(2.0)


# ---- all processes of a job ----

# Children from before adopt_orphans: a shell that becomes this program may have started
# some (`> >(tee log)`, `service & exec tfdistrun`).
_strangers: set[psutil.Process] = set()


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents end.

    Children that it has already, and all below them, are not of the job.
    """
    _strangers.update(psutil.Process().children())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def memory_of_children() -> int:
    """Most bytes that one of the processes below this one had, of those that ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def job_processes(job_tag: str, *, excluded_pids: Collection[int]) -> list[int]:
    """Processes of the job: descendants of this process, and those with its tag.

    Args:
        job_tag: value of JOB_TAG_VARIABLE in their environment.
        excluded_pids: children that are no part of it, with all below them (the guard,
            ssh).
    """
    found = set(tagged_processes(job_tag))
    for child in psutil.Process().children():
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


def send_signal(pids: Collection[int], number: int) -> None:
    """Sends a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(
    job_tag: str, *, excluded_pids: Collection[int], waited_pids: Collection[int] = ()
) -> list[int]:
    """Kills until nothing is left.

    Args:
        job_tag: as for `job_processes`.
        excluded_pids: as for `job_processes`.
        waited_pids: children whose exit codes their Popen objects still have to get.

    Returns:
        Processes that withstood (in the kernel) for 3 s.
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
    """Reaps adopted children that have ended; `own` are reaped by their Popen objects.

    A child that is reaped here before its Popen object has waited for it would be taken
    to have ended with exit code 0.
    """
    for child in psutil.Process().children():
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
    "job_processes",
    "kill_all",
    "memory_of_children",
    "reap_orphans",
    "send_signal",
    "standalone",
    "start_rank",
]
