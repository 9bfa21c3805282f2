"""The signals that tfdistrun and its agents get, and which processes they pass them to.

A rank is more than its first process: COMMAND may be a shell script that starts the
program, and the program may have children. All are in the rank's process group unless
they leave it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # their meaning is the program's
# Default of --signal-grace-s: for the ranks to save, from an ending signal to SIGTERM
# and SIGKILL.
SIGNAL_GRACE_S = 25.0
# One act of the user may bring several: a terminal that is closed, `timeout`.
SAME_SIGNAL_S = 1.0


class Signals:
    """Turns signals into bytes on a pipe, which a selector can wait for.

    A SIGHUP that this process was started to ignore (`nohup`) stays ignored, by the
    ranks too. What else a program can inherit is put right, for the ranks too: signals
    that are blocked, and a SIGCHLD that is ignored, with which the kernel forgets how
    children ended.
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
        """For the selector."""
        return self._read

    def take(self) -> list[int]:
        """Numbers of the signals that came."""
        try:
            return [n for n in os.read(self._read, 64) if n in self._numbers]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Puts the previous handlers back."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def pass_on(groups: Collection[int], number: int) -> None:
    """Sends a signal to those of the groups who have a use for it; nobody ends by it.

    A shell that waits for the program has none, as a rule, and would die of it. Those
    have one who have a handler, or whose first thread has the signal blocked: another
    thread, or a signalfd, waits for it. (The kernel shows what a thread waits for as
    not blocked, so that a first thread in `sigwait` is not told from others.)
    """
    for pid in _members(groups):
        if (treatment := _treatment(pid, number)) and treatment.expects:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class ChildProcesses:
    """Processes that ranks have started, and that still do what they began at a signal.

    Where COMMAND is a shell script the rank may be the shell, which dies of the signal
    at once while the program saves. The children of a rank that ends by itself do not
    count: it could have waited for them.
    """

    def __init__(self) -> None:
        self._left: dict[int, list[psutil.Process]] = {}  # by the rank's group

    def note(self, groups: Collection[int], number: int) -> None:
        """Notes the members that do not ignore the signal, which they are about to get.

        Most of the others never end by themselves: a shell has its background jobs
        ignore SIGINT.
        """
        self._left = {group: [] for group in groups}
        for pid, group in _members(groups).items():
            if (treatment := _treatment(pid, number)) and not treatment.ignores:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._left[group].append(psutil.Process(pid))

    def rank_ended(self, group: int, code: int) -> None:
        """Forgets the children of a rank that did not die of a signal."""
        if code >= 0:
            self._left.pop(group, None)

    def are_left(self) -> bool:
        """Whether some of them run."""
        self._left = {
            group: [one for one in listed if _runs(one)]
            for group, listed in self._left.items()
        }
        return any(self._left.values())


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended; another one with its id does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(groups: Collection[int]) -> dict[int, int]:
    """Ids of processes, and which of the groups they are in."""
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if (group := os.getpgid(pid)) in groups:
                found[pid] = group
    return found


@dataclass(frozen=True)
class _Treatment:
    """Disposition of one signal in a process; neither flag means the default."""

    ignores: bool
    expects: bool  # it has a handler, or its first thread has the signal blocked


def _treatment(pid: int, number: int) -> _Treatment | None:
    """None: it has ended."""
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
