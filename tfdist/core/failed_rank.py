"""Another rank's failure, as the errors that were raised in this process have named it.

A program that catches such an error may end with `sys.exit(1)`, of which no exception
hook is told; at exit the launcher still learns which rank was at fault.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class _State:
    own: tuple[int, int] | None = None  # process and rank, while in a world
    noted: tuple[int, str] | None = None


_state = _State()


def begin(rank: int) -> None:
    """A world begins, in which this process is `rank`."""
    _state.own, _state.noted = (os.getpid(), rank), None


def end() -> None:
    """The world has ended; what it has noted stays."""
    _state.own = None


def note(rank: int, reason: str) -> None:
    """Remembers that an error was raised here because of another rank.

    Args:
        rank: the one at fault; this rank itself is not noted, nor is any rank outside
            of a world.
        reason: class and first line of the error.
    """
    if _state.own is None:
        return
    pid, own = _state.own
    if pid == os.getpid() and rank != own:
        _state.noted = (rank, reason)


def noted() -> tuple[int, str] | None:
    """The rank that failed in the last world, and why; None: no error has named one."""
    return _state.noted
