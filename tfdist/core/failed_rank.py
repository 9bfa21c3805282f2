"""Records which other rank failed, according to the errors raised in this process.

A program that catches such an error may end with `sys.exit(1)`, which does not call the
exception hook. The failed rank is still reported to the launcher at exit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class _State:
    own_process: tuple[int, int] | None = None  # process id and rank, while in a world
    failure: tuple[int, str] | None = None


_state = _State()


def begin(rank: int) -> None:
    """Records that a world has started in which this process is rank `rank`."""
    _state.own_process, _state.failure = (os.getpid(), rank), None


def end() -> None:
    """Records that the world has ended; keeps the recorded failure."""
    _state.own_process = None


def record(rank: int, reason: str) -> None:
    """Records that an error was raised in this process because of another rank.

    Args:
        rank: rank at fault. Ignored if it is this rank, or if there is no world.
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
