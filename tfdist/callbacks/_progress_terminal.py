"""Shows the progress line: rewritten in place on a terminal, else line by line."""

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
        self.quiet = True  # its reader has gone: no reason to stop training


class Display:
    """Shows a line that changes.

    The line is rewritten in place on a terminal; the launcher gives one to rank 0 if it
    is on a terminal itself. Anywhere else (a file, a pipe, a notebook, a terminal
    without a width, as mpirun makes them) each is a line of its own, and they come less
    often.

    Args:
        file: text stream.
        every_s: seconds between two lines; None: 0.25 on a terminal, else 10.
    """

    def __init__(self, file: TextIO, every_s: float | None = None) -> None:
        self._file = file
        self.is_terminal = self.width is not None
        default_s = EVERY_S if self.is_terminal else EVERY_S_IN_A_FILE
        self.every_s = default_s if every_s is None else every_s
        self._console = _Console(
            file=file,
            force_terminal=self.is_terminal,  # whatever FORCE_COLOR says
            force_jupyter=False,
            color_system=None,
        )
        self._shown = 0  # cells of the line that can be rewritten
        self._next_s: float | None = None

    @property
    def width(self) -> int | None:
        """Longest line that is not broken into two; None: any."""
        try:  # rich looks at the standard streams, which may be another terminal
            if not self._file.isatty() or os.environ.get("TERM") == "dumb":
                return None
            columns = os.get_terminal_size(self._file.fileno()).columns
        except (OSError, ValueError, AttributeError):
            return None
        return max(1, columns - 1) if columns else None

    @property
    def bar(self) -> str:
        """Characters for the two parts of a bar; none without a terminal."""
        if not self.is_terminal:
            return ""
        return "=-" if self._console.options.ascii_only else "━─"

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next line. The first is due at once on terminals.

        Args:
            now_s: by a monotonic clock.
        """
        if self._next_s is None:
            self._next_s = now_s + (0.0 if self.is_terminal else self.every_s)
        return now_s >= self._next_s

    def show(self, line: str, now_s: float) -> None:
        """Shows the line as it is now."""
        self._next_s = now_s + self.every_s
        self._print(line, end="" if self.is_terminal else "\n")
        self._shown = cell_len(line) if self.is_terminal else 0

    def finish(self, line: str | None = None) -> None:
        """Completes the line, as `line` or as it stands; the next one is a new one."""
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
        except (OSError, ValueError):  # a full disk, a closed file: likewise
            console.quiet = True
