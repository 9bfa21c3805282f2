"""Calls functions of C libraries that may wait forever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class BoundedThread:
    """A thread that runs functions, one after the other, for callers with a deadline.

    Libraries such as MPI have to be started and ended by the same thread.

    Args:
        name: of the thread.

    Attributes:
        is_stuck: whether a call was given up before its function returned.
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
            function: must not raise.
            deadline: monotonic time until which it has to return; None: no limit.

        Raises:
            TimeoutError: `function` has not returned by then. It still runs, and may
                never end; then no later call does either.
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
