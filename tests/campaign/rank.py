"""One rank of a trial: steps of small buckets until something goes wrong.

Runs in a child that `trial.py` forked, and writes JSON lines to a pipe:
{"say": "ready"} after a few steps, then at most one {"say": "end", ...} with the moment
(CLOCK_MONOTONIC, which all processes of a machine share), the error, the number of
steps it has applied and the engine's counters; {"say": "bug", ...} instead after an
unexpected exception.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import numpy as np
from helpers import core_client

from tfdist.core import native, runtime, world

BUCKETS = 4
ELEMENTS = 3000
WARM_STEPS = 5
DESCRIPTION = (
    "\n".join(f"w{i} float32 [{ELEMENTS}]" for i in range(BUCKETS)) + "\nop=sum"
)


def _value(step: int, bucket: int, rank: int) -> np.ndarray:
    """Small integers, so that sums are exact."""
    base = np.arange(ELEMENTS, dtype=np.float32) % 13
    return base + (step % 7) * 3 + bucket + rank


def _check(total: np.ndarray, step: int, bucket: int, size: int) -> None:
    expected = size * _value(step, bucket, 0) + size * (size - 1) // 2
    if not np.array_equal(total, expected):
        raise ValueError(f"step {step}, bucket {bucket}: a wrong sum")


class Rank:
    """A rank that trains, as far as the core can tell."""

    def __init__(self, pipe: int, seed: int, steps: int) -> None:
        self._pipe = pipe
        self._random = random.Random(seed)
        self._limit = steps
        self.applied = 0

    def say(self, word: str, **more: Any) -> None:
        """One line to the driver."""
        line = json.dumps({"say": word, "time_s": time.monotonic(), **more}) + "\n"
        os.write(self._pipe, line.encode())

    def run(self) -> None:
        """Starts, steps until an error or the limit, says how it ended."""
        error: native.CoreError | None = None
        counters: dict[str, Any] = {}
        try:
            world.start()
            group, _ = native.register_gradient_list(DESCRIPTION, [True] * BUCKETS)
            while self.applied < self._limit:
                self._step(group)
                if self.applied == WARM_STEPS:
                    self.say("ready")
            counters = native.counters()
            world.shutdown()  # others may still be in their last step
        except native.CoreError as found:
            error = found
        self.say(
            "end",
            applied=self.applied,
            counters=counters,
            code=error.code if error else 0,
            message=error.message if error else "",
            payload=error.payload if error else {},
        )

    def _step(self, group: str) -> None:
        rank, size = runtime.rank(), runtime.size()
        order = list(range(BUCKETS))
        self._random.shuffle(order)
        pending = {
            bucket: core_client.submit(
                [_value(self.applied, bucket, rank)],
                name=f"gradients/{bucket}",
                group=group,
                bucket=bucket,
                bucket_count=BUCKETS,
            )
            for bucket in order
        }
        totals = {bucket: one.wait() for bucket, one in pending.items()}
        for bucket, total in totals.items():
            _check(total[0], self.applied, bucket, size)
        self.applied += 1
        if self.applied % 16 == 0:
            core_client.barrier(f"barrier {self.applied}")


def main(pipe: int, seed: int, steps: int) -> None:
    """The life of the child."""
    rank = Rank(pipe, seed, steps)
    try:
        rank.run()
    except BaseException as error:
        rank.say("bug", message=f"{type(error).__name__}: {error}")
        raise
