"""Ranks of one host that wait for each other and exchange nothing else."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

LINE_BYTES = 64  # each rank writes to a cache line of its own
DEADLINE_S = 120.0


class Meeting:
    """A barrier: each rank counts its calls in a file that all of them map.

    Args:
        path: path of the file; a different one for each meeting.
        rank: rank of this process.
        size: number of ranks.
        deadline_s: how long to wait for the others.
    """

    def __init__(
        self, path: Path, rank: int, size: int, deadline_s: float = DEADLINE_S
    ) -> None:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(file, size * LINE_BYTES)
            self._times = mmap.mmap(file, size * LINE_BYTES)
        finally:
            os.close(file)
        self._rank, self._size, self._deadline_s = rank, size, deadline_s
        self._count = 0

    def _of(self, rank: int) -> int:
        return int(struct.unpack_from("<q", self._times, rank * LINE_BYTES)[0])

    def wait(self) -> None:
        """Waits until all ranks have called this as often as this one.

        Raises:
            TimeoutError: a rank did not call it within the deadline.
        """
        self._count += 1
        struct.pack_into("<q", self._times, self._rank * LINE_BYTES, self._count)
        limit_s = time.monotonic() + self._deadline_s
        for rank in range(self._size):
            while self._of(rank) < self._count:
                if time.monotonic() > limit_s:
                    raise TimeoutError(
                        f"rank {rank} did not come within {self._deadline_s:g} s"
                    )
                os.sched_yield()
