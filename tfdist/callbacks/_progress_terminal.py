"""Where the line of progress goes: a terminal, on which it is rewritten, or a file."""

from __future__ import annotations

import os
from typing import TextIO

EVERY_S = 0.25
EVERY_S_IN_A_FILE = 10.0


class Screen:
    """Shows a line that changes.

    On a terminal the line is rewritten in place; the launcher gives one to rank 0 when
    it is on a terminal itself. Anywhere else (a file, a pipe, a terminal without a
    width, as mpirun makes them) each is a line of its own, and they come less often.

    Args:
        file: text stream.
        every_s: seconds between two lines; None: 0.25 on a terminal, else 10.
    """

    def __init__(self, file: TextIO, every_s: float | None = None) -> None:
        self._file = file
        self.is_terminal = self.columns is not None
        default_s = EVERY_S if self.is_terminal else EVERY_S_IN_A_FILE
        self.every_s = default_s if every_s is None else every_s
        self._shown = ""
        self._next_s: float | None = None

    @property
    def columns(self) -> int | None:
        """Width of the terminal at present; None without one."""
        try:
            if not self._file.isatty() or os.environ.get("TERM") == "dumb":
                return None
            return os.get_terminal_size(self._file.fileno()).columns or None
        except (OSError, ValueError, AttributeError):
            return None

    @property
    def width(self) -> int | None:
        """Longest line that is not broken into two; None: any."""
        columns = self.columns
        return None if columns is None else max(1, columns - 1)

    @property
    def speaks_unicode(self) -> bool:
        """Whether it can show the characters of a bar."""
        encoding = getattr(self._file, "encoding", None) or ""
        return encoding.lower().replace("-", "") == "utf8"

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
        if not self.is_terminal:
            self._write(line + "\n")
        elif line != self._shown:
            self._write("\r" + line.ljust(len(self._shown)))
            self._shown = line

    def finish(self, line: str | None = None) -> None:
        """The line is complete, as `line` or as it stands; what comes is a new one."""
        if self.is_terminal:
            if line is not None:
                self._write("\r" + line.ljust(len(self._shown)).rstrip("\n") + "\n")
            elif self._shown:
                self._write("\n")
            self._shown = ""
        elif line is not None:
            self._write(line + "\n")
        self._next_s = None

    def _write(self, text: str) -> None:
        if encoding := getattr(self._file, "encoding", None):
            text = text.encode(encoding, "replace").decode(encoding)
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError):  # its reader is gone: no reason to stop training
            self.is_terminal = False
