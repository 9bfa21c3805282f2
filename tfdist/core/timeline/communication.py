"""Computes the exposed communication of each step, and the longest waits.

The trace shows the same data as slices and counters (`events.py`). These numbers
summarize how much of a step is exposed communication, and which rank causes it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.core.timeline import exposed_communication
from tfdist.core.timeline.parts import Part

_REPEAT = re.compile(r"#\d+$")  # counts the uses of the same name in one run


class Step(NamedTuple):
    """One step of one rank; times in microseconds of the rank's clock.

    Attributes:
        begin_us: start of the step.
        end_us: end of the step.
        exposed_us: time in the step during which the rank only waits for the reduction
            of gradients.
    """

    begin_us: float
    end_us: float
    exposed_us: float


class Exposure(NamedTuple):
    """Exposed communication of one rank's steps, excluding the first step.

    Attributes:
        steps: number of steps.
        mean_ms: mean exposed time of a step.
        median_ms: median exposed time of a step.
        step_ms: mean duration of a step.
        of_fit: whether these are steps of `fit`. In a custom loop, a step is the time
            from the end of one reduction of gradients to the end of the next reduction.
    """

    steps: int
    mean_ms: float
    median_ms: float
    step_ms: float
    of_fit: bool

    @property
    def share(self) -> float:
        """Returns the exposed time as a share of the time of the steps, 0 to 1."""
        return self.mean_ms / self.step_ms if self.step_ms > 0 else 0.0


class Wait(NamedTuple):
    """Time that other ranks waited for one rank, in operations with the same name.

    Attributes:
        name: name of the operations.
        rank: rank for which the others waited.
        ms: sum over the waiting ranks and over all steps, excluding the first step of
            `fit`.
    """

    name: str
    rank: int
    ms: float


def records_of(operations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts operations of a part to records like those of `native.take_records`."""
    return [
        {
            "name": op["name"],
            "code": op["code"],
            "submitted_us": op["submitted"],
            "done_us": op["done"],
        }
        for op in operations
    ]


def steps_of(part: Part) -> list[Step]:
    """Returns the steps of `fit` or, if there are none, of a custom loop.

    In a custom loop, each reduction of a gradient list ends a step, and the next step
    begins at the same time. The first step begins at the start of the part.
    """
    tails = exposed_communication.tails(records_of(part.operations))
    spans = _spans_of_fit(part)
    if not spans:
        ends = [reduced_us for _, reduced_us in tails]
        spans = list(zip([part.head["monotonic_us"], *ends], ends, strict=False))
    steps, at = [], 0
    for begin_us, end_us in spans:
        step_tails = []
        while at < len(tails) and tails[at][0] <= end_us:
            if tails[at][0] >= begin_us:
                step_tails.append(tails[at])
            at += 1
        steps.append(Step(begin_us, end_us, exposed_communication.union_us(step_tails)))
    return steps


def exposure_of(part: Part) -> Exposure | None:
    """Returns the exposed communication of a rank; None for fewer than two steps.

    The first step is excluded: it traces the graph, and the ranks wait for each other.
    """
    steps = steps_of(part)[1:]
    if not steps:
        return None
    exposed = [step.exposed_us / 1000 for step in steps]
    return Exposure(
        steps=len(steps),
        mean_ms=statistics.fmean(exposed),
        median_ms=statistics.median(exposed),
        step_ms=statistics.fmean((s.end_us - s.begin_us) / 1000 for s in steps),
        of_fit=bool(_spans_of_fit(part)),
    )


def wait_of(op: Mapping[str, Any], own_rank: int) -> tuple[int, int, int] | None:
    """Returns the rank for which an operation waited longest, and when it waited.

    Args:
        op: record of the operation as written by the core.
        own_rank: the rank that waits.

    Returns:
        The rank, begin and end in microseconds, or None if the operation waited for no
        rank.
    """
    if op["waited_for"] >= 0:
        return op["waited_for"], op["waited_since"], op["waited_until"]
    if op["last_ready"] not in (-1, own_rank) and op["agreed"] > op["submitted"]:
        return op["last_ready"], op["submitted"], op["agreed"]
    return None


def longest_waits(parts: Sequence[Part], limit: int = 3) -> list[Wait]:
    """Returns the operations in which the ranks waited longest, and for which rank.

    Args:
        parts: parts of all ranks.
        limit: largest length of the list.

    Returns:
        The waits, longest first, without waits below 0.05 ms.
    """
    total_us: dict[tuple[str, int], float] = {}
    for part in parts:
        begin_us = first_step_end_us(part)
        for op in part.operations:
            wait = wait_of(op, part.rank)
            if wait is None:
                continue
            rank, since_us, until_us = wait
            key = _REPEAT.sub("", op["name"]), rank
            us = max(0, until_us - max(since_us, begin_us))
            total_us[key] = total_us.get(key, 0.0) + us
    longest = sorted(total_us.items(), key=lambda item: (-item[1], item[0]))[:limit]
    return [Wait(*key, us / 1000) for key, us in longest if us >= 50]


def first_step_end_us(part: Part) -> int:
    """Returns when the first step of `fit` ended; 0 if there is none."""
    return min((end_us for _, end_us in _spans_of_fit(part)), default=0)


def _spans_of_fit(part: Part) -> list[tuple[int, int]]:
    return sorted((s["begin"], s["end"]) for s in part.spans if s["name"] == "step")
