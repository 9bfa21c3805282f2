"""Merges what the ranks print into one readable stream.

Each line gets the rank's name in front. A line that a rank rewrites with carriage
returns (a progress bar) is shown as it stands when the output goes to a terminal, and
once, in its last state, when it goes to a file. A lone rank's output passes unchanged.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 20
_LONGEST_LINE = 64 << 10
_ERASE = b"\r\x1b[K"
_COLORS = (36, 33, 32, 35, 34, 31)


def visible(line: bytes) -> bytes:
    """What a terminal shows of a line that was rewritten by carriage returns."""
    line = line.rstrip(b"\r\b")
    return line[line.rfind(b"\r") + 1 :].rstrip(b"\b")


class Sink:
    """Where merged lines go: one of this process's own streams.

    Args:
        file: standard output or error, binary.
        is_terminal: whether somebody watches it live.
    """

    def __init__(self, file: BinaryIO, *, is_terminal: bool) -> None:
        self._file = file
        self.is_terminal = is_terminal
        self.broken = False

    def write(self, data: bytes) -> None:
        """Writes and flushes; a reader that is gone sets `broken`."""
        if self.broken:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except (BrokenPipeError, ValueError):
            self.broken = True


@dataclass
class Screen:
    """The line at the bottom of a terminal that is not finished yet."""

    sink: Sink
    open_line: bytes = b""

    def print(self, line: bytes) -> None:
        """A finished line, above the open one."""
        if self.open_line:
            self.sink.write(_ERASE + line + b"\n" + self.open_line)
        else:
            self.sink.write(line + b"\n")

    def show(self, line: bytes) -> None:
        """Replaces the open line."""
        if line != self.open_line:
            self.sink.write((_ERASE if self.open_line else b"") + line)
            self.open_line = line

    def finish(self, line: bytes) -> None:
        """The open line is finished, as `line`."""
        self.sink.write((_ERASE if self.open_line else b"") + line + b"\n")
        self.open_line = b""


@dataclass
class RankOutput:
    """What one rank prints: to the screen, to its log file, and its last lines."""

    rank: int
    size: int
    log: BinaryIO | None = None
    timestamps: bool = False
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def prefix(self, *, color: bool) -> bytes:
        """What stands in front of its lines."""
        if self.size == 1:
            return b""
        stamp = ""
        if self.timestamps:
            now = time.time()
            stamp = time.strftime(" %H:%M:%S", time.localtime(now))
            stamp += f".{int(now * 1000) % 1000:03d}"
        text = f"[rank {self.rank}{stamp}]".encode()
        if color:
            text = b"\x1b[%dm%s\x1b[0m" % (_COLORS[self.rank % len(_COLORS)], text)
        return text + b" "


class StreamMerger:
    """One stream (standard output or error) of one rank on its way to a screen."""

    def __init__(self, output: RankOutput, screen: Screen, *, color: bool) -> None:
        self._output = output
        self._screen = screen
        self._color = color
        self._partial = b""
        self._is_open = False  # the screen's open line is this stream's

    def feed(self, data: bytes) -> None:
        """Takes what the rank printed."""
        if self._output.log is not None:
            self._output.log.write(data)
        if self._output.size == 1:
            self._screen.sink.write(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        while len(self._partial) > _LONGEST_LINE:
            self._line(self._partial[:_LONGEST_LINE])
            self._partial = self._partial[_LONGEST_LINE:]
        self._show_partial()

    def end(self) -> None:
        """The stream is closed: what is left is a line."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _line(self, line: bytes) -> None:
        text = visible(line)
        self._output.tail.append(text)
        if self._output.size == 1:
            return
        text = self._output.prefix(color=self._color) + text
        if self._is_open and self._screen.open_line:
            self._screen.finish(text)
        else:
            self._screen.print(text)
        self._is_open = False

    def _show_partial(self) -> None:
        if self._output.size == 1 or not self._screen.sink.is_terminal:
            return
        text = visible(self._partial)
        if text and (self._is_open or not self._screen.open_line):
            self._screen.show(self._output.prefix(color=self._color) + text)
            self._is_open = True


def log_folder(chosen: str | None) -> Path:
    """Makes the folder of the log files.

    Args:
        chosen: by the user; None: tfdist-logs/<time>-<process> in the current folder.

    Raises:
        OSError: it cannot be made.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(chosen) if chosen else Path("tfdist-logs") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def complain(*lines: str) -> None:
    """Writes to standard error, in the name of tfdistrun."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    for line in lines:
        style = "" if line.startswith("  ") else "bold red"
        console.print(f"tfdistrun: {line}", style=style if console.is_terminal else "")
