"""Handles SIGTERM in a rank that can hand over; a second SIGTERM ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM  # as in a shell; means: start the job again
# A single event may send several signals: a terminal that closes, `timeout`, or a batch
# system whose signal tfdistrun also forwards.
SAME_SIGNAL_S = 1.0


class TermSignal:
    """A SIGTERM handler that runs at once, even while the main thread is busy.

    Python runs signal handlers between two bytecodes of the main thread, which may be
    in a long operation of TensorFlow. Therefore a thread reads signal numbers from a
    pipe, to which Python writes immediately (`signal.set_wakeup_fd`).

    A second SIGTERM, more than a second after the first one, terminates the process
    immediately.

    Args:
        on_signal: function that is called once, on the thread of this object.

    Attributes:
        received: whether SIGTERM has arrived.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received = False
        self._on_signal = on_signal
        self._first_s = 0.0
        self._fds: tuple[int, int] | None = None

    @property
    def listens(self) -> bool:
        """Whether SIGTERM is handled."""
        return self._fds is not None

    def listen(self) -> None:
        """Begins to handle SIGTERM.

        Does nothing if this object or the program already handles SIGTERM, if the
        program uses `signal.set_wakeup_fd`, or outside the main thread, where Python
        cannot set handlers.
        """
        is_main = threading.current_thread() is threading.main_thread()
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.listens or not is_main or not is_free:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # the program, or an event loop in this thread, uses it
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._fds = read, write
        signal.signal(signal.SIGTERM, _ignore)
        _in_child.add(write)
        threading.Thread(
            target=self._read, args=(read,), name="tfdist-sigterm", daemon=True
        ).start()

    def close(self) -> None:
        """Restores the default action of SIGTERM."""
        if self._fds is None:
            return
        _, write = self._fds
        self._fds = None
        if threading.current_thread() is not threading.main_thread():
            return  # the thread still ends the process at a second signal
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (now := signal.set_wakeup_fd(-1)) not in (-1, write):
            signal.set_wakeup_fd(now)
        _in_child.discard(write)
        os.close(write)  # ends the thread

    def _read(self, fd: int) -> None:
        while numbers := os.read(fd, 64):
            if signal.SIGTERM in numbers:
                self._note()
        os.close(fd)

    def _note(self) -> None:
        now_s = time.monotonic()
        if not self.received:
            self.received, self._first_s = True, now_s
            self._on_signal()
        elif now_s > self._first_s + SAME_SIGNAL_S:
            os._exit(EXIT_CODE)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replaces the default action, which would terminate the process."""


# ---- forked processes ----

# Descriptors to which a forked process must not write when it receives a signal itself.
_in_child: set[int] = set()
_forking = threading.local()


def _before_fork() -> None:
    """Blocks SIGTERM in the child until its default action is restored."""
    _forking.mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, [signal.SIGTERM] if _in_child else []
    )


def _after_in_child() -> None:
    if _in_child:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _in_child.clear()
    _after_fork()


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(
    before=_before_fork, after_in_child=_after_in_child, after_in_parent=_after_fork
)
