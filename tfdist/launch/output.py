"""Merges the output of the ranks into one readable stream.

Each line starts with the rank's name. A rank may rewrite a line with carriage returns
(a progress bar). On a terminal, such a line is updated in place; to a file, only its
final state is written. The output of a job with one rank is passed on unchanged, unless
it needs timestamps.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

TAIL_LINES = 20
_LONGEST_LINE = 64 << 10
_WRITE_BYTES = 64 << 10
_TRY_AGAIN_S = 1.0
_ERASE = b"\r\x1b[K"
_COLORS = (36, 33, 32, 35, 34, 31)


def visible(line: bytes) -> bytes:
    """Returns the text that a terminal shows for a line with carriage returns."""
    return last_state(line).rstrip(b"\r\b")


def last_state(line: bytes) -> bytes:
    """Returns the current state of a line that is rewritten by carriage returns.

    Carriage returns at the end of the line are kept: only the text that follows shows
    whether the line is rewritten.
    """
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r\b"))) + 1 :]


def _end_of_character(text: bytes, end: int) -> int:
    """Returns where to cut: at `end`, or before an incomplete UTF-8 character."""
    for back in range(4):
        if text[end - back] & 0xC0 != 0x80:
            return end - back
    return end


class Sink:
    """Destination of merged lines: one of this process's own streams.

    A thread writes the lines, so a paused reader (`| less`, Ctrl-S) does not block
    anything else. Data is queued without a limit unless the caller stops when the sink
    is `full`, or sets `drops`.

    Args:
        fd: descriptor of standard output or error; None if it is closed: all output is
            then dropped.
        is_terminal: whether the descriptor is a terminal.
    """

    MOST_BYTES = 1 << 20

    def __init__(self, fd: int | None, *, is_terminal: bool) -> None:
        self._fd = fd
        self.is_terminal = is_terminal
        self.error: OSError | None = None  # set once nothing more can be written
        self.drops = False  # whether to drop data when the sink is full
        self._waiting = bytearray()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes, *, keep: bool = False) -> None:
        """Queues data for writing; a failed write sets `error`.

        Args:
            data: the data.
            keep: whether to queue the data even if the sink is full and `drops` is set.
        """
        drops = self.drops and self.full and not keep
        if self._fd is None or self.error or drops:
            return
        with self._changed:
            self._waiting += data
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, args=(self._fd,), name="screen", daemon=True
            )
            self._thread.start()

    @property
    def full(self) -> bool:
        """Whether ranks should wait before they write more."""
        return len(self._waiting) >= self.MOST_BYTES and not self.error

    @property
    def empty(self) -> bool:
        """Whether all data has been written, or cannot be written."""
        return not self._waiting or self.error is not None

    def flush(self, limit_s: float) -> None:
        """Waits until the sink is empty, for at most `limit_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.empty, limit_s)

    def _write_all(self, fd: int) -> None:
        """Writes queued data for as long as the process lives."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = bytes(self._waiting[:_WRITE_BYTES])
            try:
                written = os.write(fd, data)
            except BlockingIOError:  # the pipe's creator made it non-blocking
                select.select([], [fd], [], _TRY_AGAIN_S)
                continue
            except OSError as error:
                with self._changed:
                    self.error = error
                    self._changed.notify()
                return
            with self._changed:
                del self._waiting[:written]
                self._changed.notify()


@dataclass
class Screen:
    """A sink with an unfinished last line, which can be rewritten on a terminal."""

    sink: Sink
    open_line: bytes = b""
    lines: int = 0  # number of lines printed here by ranks

    def print(self, line: bytes) -> None:
        """Prints a finished line above the open line."""
        self.sink.write(self._above_open_line(line + b"\n"))

    def complain(self, *lines: str) -> None:
        """Prints messages of tfdistrun like `complain`, but never waits for a reader.

        The event loop of a running job prints in this way: while it waited, it would
        neither pass signals on nor end ranks.
        """
        text = io.StringIO()
        _print_messages(lines, file=text, force_terminal=self.sink.is_terminal or None)
        data = text.getvalue().encode("utf-8", "backslashreplace")
        self.sink.write(self._above_open_line(data), keep=True)

    def _above_open_line(self, lines: bytes) -> bytes:
        return _ERASE + lines + self.open_line if self.open_line else lines

    def show(self, line: bytes) -> None:
        """Replaces the open line."""
        if line != self.open_line:
            self.sink.write((_ERASE if self.open_line else b"") + line)
            self.open_line = line

    def finish(self, line: bytes) -> None:
        """Replaces the open line with `line`, and finishes it."""
        self.sink.write((_ERASE if self.open_line else b"") + line + b"\n")
        self.open_line = b""


@dataclass
class RankOutput:
    """Output of one rank: screen prefix, log file and last lines.

    The prefix contains `name`, or "rank N" if `name` is "". `log_path` is the path of
    the log file, even after it has been closed; None if there is none.
    """

    rank: int
    size: int
    log: BinaryIO | None = None
    timestamps: bool = False
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    tail_on: Screen | None = None  # screen of the last line
    tail_at: int = 0  # number of the last line on that screen
    name: str = ""
    log_path: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Stores the path of the log file."""
        if self.log is not None:
            self.log_path = Path(self.log.name)

    def close(self) -> None:
        """Closes the log file; later output only goes to the screen."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def tail_is_shown(self, screen: Screen) -> bool:
        """Returns whether the rank's last lines are among the screen's last lines."""
        return self.tail_on is screen and screen.lines - self.tail_at < TAIL_LINES

    def note(self, text: str) -> None:
        """Writes text to the log file, and not to the screen."""
        if self.log is not None:
            with contextlib.suppress(OSError):
                self.log.write(text.encode("utf-8", "replace"))

    @property
    def passes_unchanged(self) -> bool:
        """Whether the rank's output is shown unchanged on the screen."""
        return self.size == 1 and not self.timestamps

    def prefix(self, *, color: bool) -> bytes:
        """Returns the prefix of the rank's lines; empty if they pass unchanged."""
        if self.passes_unchanged:
            return b""
        stamp = ""
        if self.timestamps:
            now = time.time()
            stamp = time.strftime(" %H:%M:%S", time.localtime(now))
            stamp += f".{int(now * 1000) % 1000:03d}"
        text = f"[{self.name or f'rank {self.rank}'}{stamp}]".encode()
        if color:
            text = b"\x1b[%dm%s\x1b[0m" % (_COLORS[self.rank % len(_COLORS)], text)
        return text + b" "


class StreamMerger:
    """Shows one stream (standard output or error) of one rank on a screen."""

    def __init__(self, output: RankOutput, screen: Screen, *, color: bool) -> None:
        self._output = output
        self._screen = screen
        self._color = color
        self._partial = b""
        self._is_open = False  # the screen's open line is this stream's

    def feed(self, data: bytes) -> None:
        """Processes output of the rank."""
        self._keep(data)
        if self._output.passes_unchanged:
            self._screen.sink.write(data)
        *lines, partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._partial = last_state(partial)
        while len(self._partial) > _LONGEST_LINE:
            end = _end_of_character(self._partial, _LONGEST_LINE)
            self._line(self._partial[:end])
            self._partial = self._partial[end:]
        self._show_partial()

    def end(self) -> None:
        """Handles the end of the stream: the remaining text becomes a line."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _keep(self, data: bytes) -> None:
        """Writes data to the log file; a write error ends the log, but not the job."""
        log = self._output.log
        if log is None:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[log.write(rest) :]
        except OSError as error:
            self._output.log = None
            text = f"cannot write to {log.name}: {error.strerror}; the log ends here"
            self._screen.print(f"tfdistrun: warning: {text}".encode())

    def _line(self, line: bytes) -> None:
        text = visible(line)
        self._output.tail.append(text)
        self._screen.lines += 1
        self._output.tail_on, self._output.tail_at = self._screen, self._screen.lines
        if self._output.passes_unchanged:
            return
        text = self._output.prefix(color=self._color) + text
        if self._is_open and self._screen.open_line:
            self._screen.finish(text)
        else:
            self._screen.print(text)
        self._is_open = False

    def _show_partial(self) -> None:
        if self._output.passes_unchanged or not self._screen.sink.is_terminal:
            return
        text = visible(self._partial)
        if text and (self._is_open or not self._screen.open_line):
            self._screen.show(self._output.prefix(color=self._color) + text)
            self._is_open = True


class FolderInUseError(Exception):
    """Another job writes its output to the same folder."""


def log_folder(chosen: str | None) -> Path:
    """Creates the folder of the log files.

    Args:
        chosen: folder that the user chose; None: tfdist-logs/<time>-<process> in the
            current folder.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(chosen) if chosen else Path("tfdist-logs") / name
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Locks the log folder against other jobs while the context is open.

    Raises:
        FolderInUseError: another tfdistrun uses the folder.
    """
    with contextlib.ExitStack() as stack:
        # Without read permission, or on a file system without locks, another job in the
        # same folder is not noticed.
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUseError from None
        yield


def complain(*lines: str) -> None:
    """Writes messages of tfdistrun to standard error, if it is open.

    Waits until they are written. While ranks run, use `Screen.complain` instead.
    """
    _print_messages(lines, stderr=True)


def _print_messages(lines: Sequence[str], **options: Any) -> None:
    """Prints messages of tfdistrun with a `Console` of these options."""
    from rich.console import Console

    class Unread(Console):
        def on_broken_pipe(self) -> None:
            """Ignores the error: the exit code remains the job's."""

    console = Unread(
        **options, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    for line in lines:
        style = "" if line.startswith("  ") else "bold red"
        with contextlib.suppress(OSError):
            console.print(
                f"tfdistrun: {line}", style=style if console.is_terminal else ""
            )
