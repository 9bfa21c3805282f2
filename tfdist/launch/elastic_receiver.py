"""Passes messages for an elastic job from other threads to the supervisor's thread."""

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
    """A queue of messages from other threads to the supervisor's thread.

    Attributes:
        fd: descriptor that becomes readable when there are messages.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, key: str, value: Any) -> None:
        """Queues a key that a rank has set, if it is meant for the launcher.

        The store calls this, on its own thread, with every key that a rank sets.
        """
        if is_for_launcher(key):
            self._put(key, value)

    def discovered(self, found: Sequence[Host] | DiscoveryError) -> None:
        """Queues the hosts, or the error, that the discovery script has produced."""
        self._put(DISCOVERED, found)

    def _put(self, key: str, value: Any) -> None:
        self._queue.put((key, value))
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[str, Any]]:
        """Returns the queued messages, in the order in which they arrived."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        found = []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found

    def close(self) -> None:
        """Closes the descriptor; other threads must not use the receiver afterwards."""
        os.close(self.fd)
