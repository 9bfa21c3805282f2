"""Takes messages for an elastic job from other threads."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from typing import Any

from tfdist.core.rendezvous.store import is_for_launcher
from tfdist.launch.discovery import DiscoveryError
from tfdist.launch.hosts import Host

DISCOVERED = "discovered"  # the key of an answer of the discovery script


class Receiver:
    """Takes messages on other threads, for the thread of the supervisor."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, key: str, value: Any) -> None:
        """Is called on the store's thread with each key that a rank sets."""
        if is_for_launcher(key):
            self._put(key, value)

    def discovered(self, found: Sequence[Host] | DiscoveryError) -> None:
        """Takes what a discovery script has found."""
        self._put(DISCOVERED, found)

    def _put(self, key: str, value: Any) -> None:
        self._queue.put((key, value))
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[str, Any]]:
        """Returns the messages that have come, in order."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        found = []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found

    def close(self) -> None:
        """Closes the descriptor; no other thread may use this any more."""
        os.close(self.fd)
