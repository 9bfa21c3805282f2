"""The signals that tfdistrun and its agents get, and how a loop learns of them."""

from __future__ import annotations

import os
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # their meaning is the program's
# Default of --signal-grace-s: for the ranks to save, from an ending signal to SIGTERM
# and SIGKILL.
SIGNAL_GRACE_S = 25.0
# One act of the user may bring several: a terminal that is closed, `timeout`.
SAME_SIGNAL_S = 1.0


class Signals:
    """Turns signals into bytes on a pipe, which a selector can wait for.

    A SIGHUP that this process was started to ignore (`nohup`) stays ignored, by the
    ranks too. What else a program can inherit is put right, for the ranks too: signals
    that are blocked, and a SIGCHLD that is ignored, with which the kernel forgets how
    children ended.
    """

    def __init__(self) -> None:
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = [
            number
            for number in ENDING + PASSED_ON
            if not (number == signal.SIGHUP and ignores_hangup)
        ]
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda *_: None) for number in self._numbers
        }
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous_mask = signal.pthread_sigmask(
            signal.SIG_UNBLOCK, [*ENDING, *PASSED_ON, signal.SIGCHLD]
        )

    def fileno(self) -> int:
        """For the selector."""
        return self._read

    def take(self) -> list[int]:
        """Numbers of the signals that came."""
        try:
            return [n for n in os.read(self._read, 64) if n in self._numbers]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Puts the previous handlers back."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
