"""Calls C library functions that may block forever, with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class BoundedThread:
    """A thread that runs functions one after another, for callers with a deadline.

    Libraries such as MPI must be initialized and finalized by the same thread.

    Args:
        name: name of the thread.

    Attributes:
        is_stuck: whether a call timed out or was interrupted before its function
            returned.
    """

    def __init__(self, name: str) -> None:
        self.is_stuck = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        # A daemon: a function that never returns does not keep the process alive.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            function, results = self._calls.get()
            results.put(function())

    def call(self, function: Callable[[], Any], deadline: float | None) -> Any:
        """Returns the result of `function`.

        Args:
            function: function without arguments; it must not raise.
            deadline: `time.monotonic()` time by which `function` must return; None: no
                limit.

        Raises:
            TimeoutError: `function` has not returned by the deadline. It is still
                running, and later functions run only after it returns.
        """
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        limit_s = None if deadline is None else max(0.01, deadline - time.monotonic())
        self.is_stuck = True  # also if Ctrl-C ends the wait
        self._calls.put((function, results))
        try:
            result = results.get(timeout=limit_s)
        except queue.Empty:
            raise TimeoutError from None
        self.is_stuck = False
        return result
