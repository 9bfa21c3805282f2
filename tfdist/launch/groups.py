"""The process groups of the ranks: who is in them, and what a signal does to whom.

A rank is more than its first process: COMMAND may be a shell script that starts the
program, and the program may have helpers. All are in the rank's process group unless
they leave it.
"""

from __future__ import annotations

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


def heeding(groups: Collection[int], number: int) -> list[psutil.Process]:
    """Members of these groups that do not ignore a signal.

    Most of the others never end by themselves: a shell has its background jobs ignore
    SIGINT.
    """
    found = []
    for pid in _members(groups):
        if (treatment := _treatment(pid, number)) and not treatment.ignores:
            try:
                found.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
    return found


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; another one with its id does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(groups: Collection[int]) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) in groups:
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


@dataclass(frozen=True)
class _Treatment:
    """What a process does with one signal; neither: the signal's default."""

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


__all__ = ["heeding", "pass_on", "runs", "send"]
