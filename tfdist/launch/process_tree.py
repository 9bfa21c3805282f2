"""Finds and ends every process of a job, also those that left their parents."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO, cast

import psutil

from tfdist.launch._guard import MARK, marked_processes

_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 3.0
_PAUSE_S = 0.01


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


class Guard:
    """A helper process that ends the job's processes if this one is killed."""

    def __init__(self, mark: str) -> None:
        script = Path(__file__).with_name("_guard.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), mark],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        """Of the helper."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Has it look after a process group, too, which was just made for a rank."""
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            stdin.write(b"%d\n" % group)

    def dismiss(self) -> None:
        """Everything has been ended; the helper goes."""
        try:
            self._process.communicate(b"x", timeout=2.0)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(2.0)


def job_processes(mark: str, *, excluded_pids: int | Collection[int]) -> list[int]:
    """Processes of the job: descendants of this process, and those marked with `mark`.

    Args:
        mark: value of the variable MARK in their environment.
        excluded_pids: children that are no part of it, with all below them (the guard,
            ssh).
    """
    spared = {excluded_pids} if isinstance(excluded_pids, int) else set(excluded_pids)
    found = set(marked_processes(mark))
    for child in psutil.Process().children():
        if child.pid not in spared and child not in _strangers:
            found.add(child.pid)
            found |= {below.pid for below in _below(child)}
    return [pid for pid in sorted(found - spared) if _runs(pid)]


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


def send(pids: list[int], number: signal.Signals) -> None:
    """Sends a signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill_all(mark: str, *, excluded_pids: int) -> list[int]:
    """Kills until nothing is left; returns what withstood (in the kernel) for 3 s."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while (
        pids := job_processes(mark, excluded_pids=excluded_pids)
    ) and time.monotonic() < deadline:
        send(pids, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        reap_orphans({excluded_pids})
    reap_orphans({excluded_pids})
    return pids


def reap_orphans(own: set[int]) -> None:
    """Buries adopted children that have ended; `own` are buried by their Popen."""
    for child in psutil.Process().children():
        try:
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


__all__ = [
    "MARK",
    "Guard",
    "adopt_orphans",
    "kill_all",
    "job_processes",
    "reap_orphans",
    "send",
]
