"""What every worker does alike. Runs in the peers' environments: standard library only.

A worker is started once for each rank with the path of a task, a JSON file:

    task        what is measured: "sizes", "gradients" or "training"
    cap_s       seconds for one case, repetitions at most within them
    folder      where rank R leaves rankR.json: {"seconds": {case: [...]}, ...}

A case is "series/what". The seconds of a case are one rank's; the slowest rank of each
repetition counts, which the reader sees to.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# At 1 KiB this is a quarter of a second in TensorFlow and a tenth of one in C: dozens
# of the 4 ms for which a scheduler leaves things as they are. Fewer would show one
# placement of the threads.
LEAST, MOST, MOST_IN_C = 4, 1000, 100_000
BLOCKS = 5
LONG_S = 0.2  # one warm-up is enough for what takes so long

# Repeats an operation so many times; the seconds of each.
Repeat = Callable[[int], list[float]]
# The mean over all ranks, the same bits on each.
Agree = Callable[[float], float]


def task() -> dict[str, Any]:
    """What this worker is asked for."""
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
    """Warms up; how many repetitions `cap_s` has room for, the same on every rank."""
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
    """Measures operations whose differences matter: all of them in each of BLOCKS."""
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
