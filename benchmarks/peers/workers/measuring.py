"""Shared code of the workers: standard library only, for the peers' environments.

A worker is started once for each rank with the path of a task, a JSON file:

    task        what is measured: "sizes", "gradients" or "training"
    cap_s       seconds for one case, which limit the number of repetitions
    folder      where rank R leaves rankR.json: {"seconds": {case: [...]}, ...}

A case is "series/what", for example "allreduce/1024". A rank writes its own seconds;
`merged` in ../trial.py combines those of all ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# At 1 KiB, the most repetitions take a quarter of a second in TensorFlow and a tenth of
# a second in C: dozens of scheduler ticks of 4 ms. Fewer would show a single placement
# of the threads.
LEAST, MOST, MOST_IN_C = 4, 1000, 100_000
BLOCKS = 5
LONG_S = 0.2  # one warm-up is enough for what takes so long

# Repeats an operation so many times; the seconds of each.
Repeat = Callable[[int], list[float]]
# The mean over all ranks, the same bits on each.
Agree = Callable[[float], float]


def task() -> dict[str, Any]:
    """The task of this worker."""
    return dict(json.loads(Path(sys.argv[1]).read_text()))


def repeated(operation: Callable[[], object]) -> Repeat:
    """Repeats a Python call that blocks until its result is there."""

    def repeat(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin_s = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - begin_s)
        return seconds

    return repeat


def _count(repeat: Repeat, agree: Agree, cap_s: float, most: int) -> int:
    """Warms up; returns how many repetitions fit in `cap_s`, equal on all ranks."""
    for _ in range(3):
        mean_s = agree(repeat(1)[0])
        if mean_s > LONG_S:
            break
    else:
        mean_s = agree(min(repeat(5)))
    return int(min(most, max(LEAST, cap_s / max(mean_s, 1e-7))))


def measure(
    repeat: Repeat, agree: Agree, cap_s: float, most: int = MOST
) -> list[float]:
    """Repeats as often as `cap_s` allows, LEAST times at least."""
    count = _count(repeat, agree, cap_s, most)
    repeat(2)  # in step again after `agree`
    return repeat(count)


def in_turns(
    repeats: dict[str, Repeat], agree: Agree, cap_s: float
) -> dict[str, list[float]]:
    """Measures operations to be compared: some repetitions of each in every block."""
    counts = {
        name: _count(repeat, agree, cap_s, MOST) for name, repeat in repeats.items()
    }
    found: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(BLOCKS):
        for name, repeat in repeats.items():
            repeat(2)  # in step again
            found[name] += repeat(max(1, counts[name] // BLOCKS))
    return found


def leave(
    task: dict[str, Any],
    rank: int,
    size: int,
    versions: dict[str, str],
    seconds: dict[str, list[float]],
    **more: Any,
) -> None:
    """Writes what this rank has measured."""
    result = {"size": size, "versions": versions, "seconds": seconds, **more}
    Path(task["folder"], f"rank{rank}.json").write_text(json.dumps(result))
