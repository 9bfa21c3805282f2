"""Shows the progress line, which is updated in place on a terminal."""

from __future__ import annotations

import os
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

EVERY_S = 0.25
EVERY_S_IN_A_FILE = 10.0
_RETURN = Control(ControlType.CARRIAGE_RETURN)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # the pipe is closed, but training continues


class Display:
    """Display of a line that changes.

    On a terminal, the line is updated in place. If the launcher runs on a terminal, so
    does rank 0. Elsewhere (in a file, a pipe, a notebook, or a terminal without a
    width, as under mpirun) each update is written as a new line, and updates are less
    frequent.

    Args:
        file: text stream for the line.
        every_s: seconds between two updates; None: 0.25 on a terminal, otherwise 10.
    """

    def __init__(self, file: TextIO, every_s: float | None = None) -> None:
        self._file = file
        self.is_terminal = self.width is not None
        default_s = EVERY_S if self.is_terminal else EVERY_S_IN_A_FILE
        self.every_s = default_s if every_s is None else every_s
        self._console = _Console(
            file=file,
            force_terminal=self.is_terminal,  # overrides FORCE_COLOR
            force_jupyter=False,
            color_system=None,
        )
        self._shown = 0  # width of the line that can be updated
        self._next_s: float | None = None

    @property
    def width(self) -> int | None:
        """Length of the longest line that is not wrapped; None: no limit."""
        try:  # rich uses the standard streams, which may be a different terminal
            if not self._file.isatty() or os.environ.get("TERM") == "dumb":
                return None
            columns = os.get_terminal_size(self._file.fileno()).columns
        except (OSError, ValueError, AttributeError):
            return None
        return max(1, columns - 1) if columns else None

    @property
    def bar(self) -> str:
        """Characters for the two parts of a bar; "" without a terminal."""
        if not self.is_terminal:
            return ""
        return "=-" if self._console.options.ascii_only else "━─"

    def is_due(self, now_s: float) -> bool:
        """Returns whether the next line is due; on a terminal the first is due at once.

        Args:
            now_s: current time of a monotonic clock, in seconds.
        """
        if self._next_s is None:
            self._next_s = now_s + (0.0 if self.is_terminal else self.every_s)
        return now_s >= self._next_s

    def show(self, line: str, now_s: float) -> None:
        """Shows the current line."""
        self._next_s = now_s + self.every_s
        self._print(line, end="" if self.is_terminal else "\n")
        self._shown = cell_len(line) if self.is_terminal else 0

    def finish(self, line: str | None = None) -> None:
        """Ends the current line, after replacing it with `line` if given."""
        if line is not None:
            self._print(line, end="\n")
        elif self._shown:
            self._shown = 0
            self._print("", end="\n")
        self._shown = 0
        self._next_s = None

    def _print(self, line: str, end: str) -> None:
        console = self._console
        text = line.encode(console.encoding, "replace").decode(console.encoding)
        try:
            with console:  # one write
                if self._shown:
                    console.control(_RETURN)
                    text = set_cell_size(text, max(cell_len(text), self._shown))
                console.print(Text(text), end=end, soft_wrap=True, highlight=False)
        except (OSError, ValueError):  # the disk is full or the file is closed
            console.quiet = True
