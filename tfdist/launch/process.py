"""One rank: its process, in a process group of its own, and its streams."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.core import allocator

_FEWEST_COLUMNS = 20
_MOST_CELLS = (1 << 16) - 1  # of a line, or lines, that a terminal can have
_CHILD = Path(__file__).with_name("_child.py")


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


def start(
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
    child = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid())]
    bound = ",".join(map(str, processors or ()))
    try:
        process = subprocess.Popen(
            [*child, bound, *command],
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
