"""Writes files one after the other on a thread, while the program continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_logger = logging.getLogger("tfdist")


class Job(NamedTuple):
    """A file to write.

    Attributes:
        path: path of the file, for messages.
        write: function that writes the file.
    """

    path: Path
    write: Callable[[], None]


class BackgroundWriter:
    """Writes one file at a time on a thread.

    A file that is submitted while another is being written waits. A newer file replaces
    the waiting one, with a warning, so that at most two are held in memory. An
    exception in `write` is logged as a warning. The failed job is kept for `retry`
    until a newer job is submitted.

    The thread runs only while there is something to write. It is not a daemon: at the
    end of the program, Python waits until the file is complete.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._waiting: Job | None = None
        self._failed: Job | None = None
        self._has_thread = False

    @property
    def has_failed(self) -> bool:
        """Whether the newest file could not be written."""
        with self._changed:
            return self._failed is not None

    def submit(self, job: Job) -> None:
        """Starts to write a file, or lets it wait until the current one is written."""
        with self._changed:
            replaced, self._waiting, self._failed = self._waiting, job, None
            running = self._running
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name="tfdist-checkpoint").start()
        if replaced is not None:
            _logger.warning(
                "The checkpoint %s is not written, because writing %s takes longer "
                "than the time between saves. The newer %s is written next. Save less "
                "often, or to a faster disk.",
                replaced.path,
                running.path.name if running else "the one before",
                job.path.name,
            )

    def retry(self) -> None:
        """Starts to write the newest file again if it could not be written."""
        with self._changed:
            failed = self._failed
        if failed is not None:
            self.submit(failed)

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is left to write.

        Args:
            timeout_s: seconds to wait at most.

        Returns:
            Whether all writes have ended, successfully or not.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._has_thread, timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.write()
            except Exception as error:  # noqa: BLE001 - logged; the thread continues
                self._report(job, error)

    def _next(self) -> Job | None:
        with self._changed:
            self._running, self._waiting = self._waiting, None
            if self._running is None:
                self._has_thread = False
                self._changed.notify_all()
            return self._running

    def _report(self, job: Job, error: Exception) -> None:
        _logger.warning(
            "The checkpoint %s was not saved: %s: %s. Training continues, and the next "
            "save tries again. Earlier checkpoints are unchanged.",
            job.path,
            type(error).__name__,
            error,
        )
        with self._changed:
            if self._waiting is None:
                self._failed = job
