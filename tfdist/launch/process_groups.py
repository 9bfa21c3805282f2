"""The process groups of the ranks: who is in them, and what a signal does to whom.

A rank is more than its first process: COMMAND may be a shell script that starts the
program, and the program may have helpers. All are in the rank's process group unless
they leave it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil


def send(group: int, number: int) -> None:
    """Sends a signal to a process group, if any of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def pass_on(groups: Collection[int], number: int) -> None:
    """Sends a signal to those of the groups who have a use for it; nobody ends by it.

    A shell that waits for the program has none, as a rule, and would die of it. Those
    have one who have a handler, or whose first thread has the signal blocked: another
    thread, or a signalfd, waits for it. (The kernel shows what a thread waits for as
    not blocked, so that a first thread in `sigwait` is not told from others.)
    """
    for pid in _members(groups):
        if (treatment := _treatment(pid, number)) and treatment.expects:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


class ChildProcesses:
    """Processes that ranks have started, and that still do what they began at a signal.

    Where COMMAND is a shell script the rank may be the shell, which dies of the signal
    at once while the program saves. A rank that ends by itself is not followed by
    anybody: it could have waited for its helpers.
    """

    def __init__(self) -> None:
        self._left: dict[int, list[psutil.Process]] = {}  # by the rank's group

    def note(self, groups: Collection[int], number: int) -> None:
        """The members that do not ignore the signal, which they are about to get.

        Most of the others never end by themselves: a shell has its background jobs
        ignore SIGINT.
        """
        self._left = {group: [] for group in groups}
        for pid, group in _members(groups).items():
            if (treatment := _treatment(pid, number)) and not treatment.ignores:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._left[group].append(psutil.Process(pid))

    def rank_ended(self, group: int, code: int) -> None:
        """Forgets them where the rank did not die of a signal."""
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


__all__ = ["ChildProcesses", "pass_on", "send"]
