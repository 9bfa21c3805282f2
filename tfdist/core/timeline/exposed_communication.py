"""Exposed communication: the part of a step in which a rank waits for gradients.

Buckets of gradients are sent while the backward pass is still running. Once the last
bucket has been submitted, no computation hides the remaining communication, and the
step waits. If bucket j is submitted at t_j and reduced at e_j,

    exposed = max_j e_j - max_j t_j   (T_comm_end - T_backward_end, never below 0)

A step that reduces several lists of gradients (two optimizers, or several updates in
one execution) waits for each list. The exposed time of a step is the length of the
union of these intervals; its share is this length divided by the duration of the step.

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
    VLDB 2020, section 3.2.3 (buckets overlapped with the backward pass).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# "<list>.<bucket>", or "<list>.rows<i>.values" and "<list>.rows<i>.indices" for the
# sparse gradient of a table. <list> is "<name>.<8 hexadecimal digits>". A count follows
# if the name was used before in the same graph or run.
_GRADIENTS = re.compile(
    r"(?P<list>.+\.[0-9a-f]{8})"
    r"\.(?P<part>\d+|rows\d+\.(?:values|indices))"
    r"(?P<repeat>(?:\.\d+)?(?:#\d+)?)"
)


def tails(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Returns when each gradient list was completely submitted, and when reduced.

    Args:
        records: records of finished operations from `native.take_records`, with "name",
            "submitted_us", "done_us" and "code". Operations that do not reduce
            gradients, or that failed, are ignored.

    Returns:
        For each reduction of a list the pair (last submitted, last reduced), in
        microseconds of the monotonic clock, ascending.

    Example:
        >>> def record(bucket, submitted_us, done_us):
        ...     return {"name": f"gradients.0123abcd.{bucket}", "code": 0,
        ...             "submitted_us": submitted_us, "done_us": done_us}
        >>> tails([record(0, 10, 25), record(1, 30, 42)])
        [(30, 42)]
    """
    return sorted(tail(parts) for _, parts in lists(records))


def lists(
    records: Iterable[Mapping[str, Any]],
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Returns the reductions of gradient lists, each with the records of its parts.

    Args:
        records: as for `tails`.

    Returns:
        Pairs (name of the list, its records in order of submission), ordered by their
        last submission.
    """
    running: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    found = []
    for record in sorted(records, key=lambda r: int(r["submitted_us"])):
        place = _place_of(record["name"])
        if place is None or record["code"] != 0:
            continue
        key, part = place
        if part in running.get(key, {}):  # this record belongs to the next step
            found.append((key[0], list(running.pop(key).values())))
        running.setdefault(key, {})[part] = record
    found += [(key[0], list(parts.values())) for key, parts in running.items()]
    return sorted(found, key=lambda pair: tail(pair[1]))


@functools.lru_cache(maxsize=4096)  # the names repeat in every step
def _place_of(name: str) -> tuple[tuple[str, str], str] | None:
    """Returns the gradient list of an operation, and its part of the list."""
    found = _GRADIENTS.fullmatch(name)
    if found is None:
        return None
    return (found["list"], found["repeat"]), found["part"]


def part_of(name: str) -> str:
    """Returns the part of a gradient list that an operation reduces, or "".

    The part is the index of a bucket, or e.g. "rows0.values" for a sparse gradient. The
    result is "" for operations that do not reduce gradients.

    Example:
        >>> part_of("gradients.0123abcd.2#1")
        '2'
    """
    place = _place_of(name)
    return place[1] if place else ""


def tail(parts: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns when the parts of a list were completely submitted, and when reduced.

    Example:
        >>> tail([{"submitted_us": 10, "done_us": 25},
        ...       {"submitted_us": 30, "done_us": 42}])
        (30, 42)
    """
    parts = list(parts)
    handed_over = max(int(record["submitted_us"]) for record in parts)
    reduced = max(int(record["done_us"]) for record in parts)
    return handed_over, max(handed_over, reduced)


def union_us(intervals: Sequence[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals (begin, end).

    Example:
        >>> union_us([(0, 10), (5, 12), (20, 21)])
        13
    """
    covered, end = 0, None
    for begin, own_end in sorted(intervals):
        if end is None or begin > end:
            covered, end = covered + own_end - begin, own_end
        elif own_end > end:
            covered, end = covered + own_end - end, own_end
    return covered


def exposed_us(records: Iterable[Mapping[str, Any]]) -> int:
    """Returns how long the steps of these records have waited for their gradients.

    Args:
        records: as for `tails`, for complete steps.

    Returns:
        Microseconds, 0 if nothing was reduced.
    """
    return union_us(tails(records))
