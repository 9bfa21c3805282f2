"""Remembers which other rank failed, from the errors raised in this process.

A program that catches such an error may end with `sys.exit(1)`, which calls no
exception hook. At exit the failed rank is still reported to the launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class _State:
    own_process: tuple[int, int] | None = None  # process and rank, while in a world
    failure: tuple[int, str] | None = None


_state = _State()


def begin(rank: int) -> None:
    """Begins a world in which this process is `rank`."""
    _state.own_process, _state.failure = (os.getpid(), rank), None


def end() -> None:
    """Ends the world; the recorded failure stays."""
    _state.own_process = None


def record(rank: int, reason: str) -> None:
    """Remembers that an error was raised here because of another rank.

    Args:
        rank: the rank at fault; ignored if it is this rank, or outside of a world.
        reason: class and first line of the error.
    """
    if _state.own_process is None:
        return
    pid, own_rank = _state.own_process
    if pid == os.getpid() and rank != own_rank:
        _state.failure = (rank, reason)


def last() -> tuple[int, str] | None:
    """Returns the rank that failed in the last world and the reason, or None."""
    return _state.failure
