"""The control of a benchmark: how fast this machine copies memory at the moment."""

from __future__ import annotations

import math
import time

import numpy as np


class Copier:
    """Copies of 64 MiB between two buffers that are in memory already."""

    def __init__(self) -> None:
        self._source = np.ones(64 << 20, np.uint8)
        self._target = self._source.copy()

    def gib_s(self) -> float:
        """The best of five copies."""
        best_s = math.inf
        for _ in range(5):
            begin_s = time.perf_counter()
            np.copyto(self._target, self._source)
            best_s = min(best_s, time.perf_counter() - begin_s)
        return self._source.nbytes / best_s / 2**30
