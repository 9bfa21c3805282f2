"""Signals that tfdistrun and its agents receive and pass on to processes.

A rank is more than its first process: COMMAND may be a shell script that starts the
program, and the program may have children. All of them are in the rank's process group,
unless they leave it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from tfdist.core.term_signal import SAME_SIGNAL_S

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # the program defines their meaning
# Default of --signal-grace-s: time for the ranks to save, from an ending signal to
# SIGTERM and SIGKILL.
SIGNAL_GRACE_S = 25.0
# Found in the command lines of processes that `multiprocessing` and joblib start. A
# forked process has the command line of its parent.
_WORKER_CODE = ("spawn_main", "forkserver", "resource_tracker", "loky.backend")


class Signals:
    """Turns signals into bytes on a pipe, which a selector can wait for.

    If this process was started with SIGHUP ignored (`nohup`), this process and the
    ranks continue to ignore SIGHUP. Two other inherited settings are reset, for this
    process and the ranks: signals are unblocked, and SIGCHLD is not ignored. With
    SIGCHLD ignored, the kernel would not report how children ended.
    """

    def __init__(self) -> None:
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = [
            number
            for number in ENDING + PASSED_ON
            if not (number == signal.SIGHUP and ignores_hangup)
        ]
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda *_: None) for number in self._numbers
        }
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous_mask = signal.pthread_sigmask(
            signal.SIG_UNBLOCK, [*ENDING, *PASSED_ON, signal.SIGCHLD]
        )

    def fileno(self) -> int:
        """Returns the pipe's descriptor, for a selector."""
        return self._read

    def take(self) -> list[int]:
        """Returns the numbers of the received signals."""
        try:
            return [n for n in os.read(self._read, 64) if n in self._numbers]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Restores the previous handlers."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def ask_to_end(groups: Collection[int], number: int) -> None:
    """Sends an ending signal to the processes in the groups, except to workers.

    A worker is a process that the signal would kill, and that `multiprocessing` started
    for an ancestor with a handler: for example, a process of a `Pool`. The ancestor may
    need it to finish its work.
    """
    members = _members(groups)
    workers = _workers(members, number)
    with_workers = {members[pid] for pid in workers}
    for group in groups:
        if group not in with_workers:
            signal_group(group, number)  # also reaches processes that start just now
    for pid in members.keys() - workers:
        if members[pid] in with_workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def pass_on(groups: Collection[int], number: int) -> None:
    """Sends a signal to those processes in the groups that expect it.

    Other processes would be killed by the signal, for example a shell that waits for
    the program. A process expects the signal if it has a handler, or if its first
    thread has the signal blocked: another thread, or a signalfd, then waits for it. (A
    first thread in `sigwait` cannot be recognized, since the kernel shows a signal that
    a thread waits for as not blocked.)
    """
    for pid in _members(groups):
        if (treatment := _treatment(pid, number)) and treatment.expects:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class ChildProcesses:
    """Processes that ranks have started, and that may outlive the rank after a signal.

    If COMMAND is a shell script, the rank's process may be the shell. A signal then
    kills the shell at once, while the program that the shell started is still saving
    its work. If a rank exits without being killed by a signal, its children are
    ignored: the rank could have waited for them.
    """

    def __init__(self) -> None:
        self._left: dict[int, list[psutil.Process]] = {}  # by the rank's group
        self._noted_s = float("-inf")

    def note(self, groups: Collection[int], number: int) -> None:
        """Records the processes that an ending signal reaches: all but workers.

        Call it before `ask_to_end`, or if the signal has already killed the rank.

        Processes that ignore the signal often run until SIGKILL: for example,
        background jobs of a shell ignore SIGINT.

        Args:
            groups: process groups of the ranks.
            number: number of the signal.
        """
        self._noted_s = time.monotonic()
        self._left.update({group: [] for group in groups})
        members = _members(groups)
        for pid in members.keys() - _workers(members, number):
            group = members[pid]
            if (treatment := _treatment(pid, number)) and not treatment.ignores:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._left[group].append(psutil.Process(pid))

    def signal(self, number: int) -> None:
        """Sends a signal to the recorded processes."""
        for one in itertools.chain.from_iterable(self._left.values()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                one.send_signal(number)

    def rank_ended(self, group: int, code: int) -> None:
        """Forgets the children of a rank that was not killed by a signal."""
        if code >= 0:
            self._left.pop(group, None)

    def are_left(self) -> bool:
        """Returns whether any of the recorded processes is running."""
        self._left = {
            group: [one for one in listed if _runs(one)]
            for group, listed in self._left.items()
        }
        return any(self._left.values())

    def may_be_signalled(self) -> bool:
        """Returns whether the signal that killed a rank may still reach this process.

        A batch system may signal all processes of a job, and this process last.
        """
        return time.monotonic() < self._noted_s + SAME_SIGNAL_S and self.are_left()


def _runs(process: psutil.Process) -> bool:
    """Returns whether the process is running, and its ID has not been reused."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(groups: Collection[int]) -> dict[int, int]:
    """Returns the processes in the groups: process ID → process group."""
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if (group := os.getpgid(pid)) in groups:
                found[pid] = group
    return found


def _workers(members: Collection[int], number: int) -> set[int]:
    """Returns the processes to which `ask_to_end` does not send the signal."""
    treatments = {pid: _treatment(pid, number) for pid in members}
    handling = {pid for pid, how in treatments.items() if how and how.expects}
    found = set()
    for pid, how in treatments.items():
        if how is None or how.expects or how.ignores:
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            above = [one for one in process.parents() if one.pid in handling]
            exe, words = process.exe(), process.cmdline()
            is_started = any(code in word for word in words for code in _WORKER_CODE)
            if any(
                one.exe() == exe and (is_started or one.cmdline() == words)
                for one in above
            ):
                found.add(pid)
    return found


@dataclass(frozen=True)
class _Treatment:
    """How a process handles one signal; with the default action if both are False."""

    ignores: bool
    expects: bool  # it has a handler, or its first thread has the signal blocked


def _treatment(pid: int, number: int) -> _Treatment | None:
    """Returns how a process handles a signal; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    masks = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("SigBlk", "SigIgn", "SigCgt"):
            masks[name] = int(value, 16) >> (number - 1) & 1
    if len(masks) < 3:
        return None
    return _Treatment(
        ignores=bool(masks["SigIgn"]),
        expects=bool(masks["SigCgt"] or masks["SigBlk"]),
    )
