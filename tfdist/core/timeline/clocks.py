"""Aligns the clocks of ranks by round trips to rank 0.

A rank asks at t1, rank 0 receives the request at t2 and answers at t3, and the rank
receives the answer at t4. t1 and t4 are times of the rank's clock, t2 and t3 of rank
0's clock. If both directions take equal time, the offset is

    offset = ((t2 - t1) + (t3 - t4)) / 2    (rank 0's clock minus the rank's clock)

However unequal the directions are, the error of the offset is at most half of the round
trip, ((t4 - t1) - (t3 - t2)) / 2. So the measurement with the shortest round trip is
used. Clocks drift by about 10 us per second. Between two such measurements, the offset
is interpolated linearly.

References:
    F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
    D. Mills et al., Network Time Protocol Version 4, RFC 5905 (2010), section 8.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

WINDOW_US = 10_000_000  # the best round trip in each window is used


@dataclasses.dataclass(frozen=True)
class Offset:
    """One measurement of the offset.

    Attributes:
        at_us: time of the measurement on the rank's clock.
        offset_us: rank 0's clock minus the rank's clock.
        error_us: largest possible error of the offset.
    """

    at_us: float
    offset_us: float
    error_us: float


def offset_of(sample: Mapping[str, int]) -> Offset:
    """Returns the offset computed from one round trip.

    Args:
        sample: "asked", "heard", "answered" and "back": t1 to t4, in microseconds.

    Example:
        >>> offset_of({"asked": 100, "heard": 5150, "answered": 5160, "back": 210})
        Offset(at_us=155.0, offset_us=5000.0, error_us=50.0)
    """
    t1, t2, t3, t4 = (float(sample[k]) for k in ("asked", "heard", "answered", "back"))
    offset_us = ((t2 - t1) + (t3 - t4)) / 2
    return Offset((t1 + t4) / 2, offset_us, max(0.0, ((t4 - t1) - (t3 - t2)) / 2))


def best_offsets(samples: Iterable[Mapping[str, int]]) -> list[Offset]:
    """Returns the measurement with the shortest round trip in each window of 10 s."""
    windows: dict[int, Offset] = {}
    for sample in samples:
        offset = offset_of(sample)
        window = int(offset.at_us // WINDOW_US)
        known = windows.get(window)
        if known is None or offset.error_us < known.error_us:
            windows[window] = offset
    return [windows[window] for window in sorted(windows)]


def to_rank_zero(
    samples: Iterable[Mapping[str, int]], *, same_host: bool
) -> tuple[Callable[[float], float], float | None]:
    """Returns a function that converts times of a rank to rank 0's clock.

    Processes on one host share a monotonic clock. If every measurement is consistent
    with the offset 0, exactly 0 is used.

    Args:
        samples: round trips of the rank.
        same_host: whether the rank is on the host of rank 0.

    Returns:
        The function, on microseconds, and its largest error in microseconds. Without
        samples, times are not converted; the error is then 0 if the rank is on the host
        of rank 0, else None.

    Example:
        >>> trip = {"asked": 100, "heard": 5150, "answered": 5160, "back": 210}
        >>> convert, error_us = to_rank_zero([trip], same_host=False)
        >>> convert(1000), error_us
        (6000.0, 50.0)
    """
    points = best_offsets(samples)
    if same_host and all(abs(p.offset_us) <= p.error_us for p in points):
        return (lambda us: us), 0.0
    if not points:
        return (lambda us: us), None
    at_us = [p.at_us for p in points]
    return (
        lambda us: us + _interpolate(points, at_us, us),
        max(p.error_us for p in points),
    )


def _interpolate(points: Sequence[Offset], at_us: Sequence[float], us: float) -> float:
    after = bisect.bisect_left(at_us, us)
    if after == 0:
        return points[0].offset_us
    if after == len(points):
        return points[-1].offset_us
    one, two = points[after - 1], points[after]
    share = (us - one.at_us) / (two.at_us - one.at_us)
    return one.offset_us + share * (two.offset_us - one.offset_us)
