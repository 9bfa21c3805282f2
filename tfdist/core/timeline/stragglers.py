"""Finds stragglers: ranks whose own work takes longer than that of the other ranks.

In synchronous training a step takes the same time on all ranks, because the fast ranks
wait for the slow ones. So the ranks are compared by their *work*, which is the time in
which they do not wait:

    work = elapsed time - time in which the program could only wait for its operations
                          (tfdist_ops/runtime/blocked_time.h)

The work of a rank is compared with the *median* of the work of all ranks. If the number
of ranks is even, the median is the lower of the two middle values. So a median rank is
never slow itself, and of two ranks, the slower rank is compared with the faster rank.

The functions are pure: all ranks pass the same times, and get the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

SLOW_RANKS = "slow ranks"  # name of the resource `SlowRanks`
# A rank is not slow if it costs the other ranks less than this share of their time.
_LEAST_SHARE = 0.1
_MOST_BETWEEN_S = 5.0
# If steps are short enough, at least this number of comparisons is made in the time
# after which a slow rank is named.
_COMPARISONS = 6


@dataclasses.dataclass(frozen=True)
class Times:
    """Times that one rank has measured since the last comparison.

    Attributes:
        elapsed_s: seconds in training steps.
        work_s: part of `elapsed_s` in which the rank did not wait for collectives.
        samples: samples of this rank in a step, or another measure of its share of the
            work; only the ratios between the ranks matter.
    """

    elapsed_s: float
    work_s: float
    samples: float = 1.0


@dataclasses.dataclass(frozen=True)
class Standing:
    """Result of all comparisons of one rank so far.

    Attributes:
        is_slow: whether the rank is named as slow.
        differs_s: seconds since the first of the consecutive comparisons that have
            contradicted `is_slow`; None if the last comparison did not.
        slow_s: seconds for which the rank has been slow.
        work_s: work of the rank in these seconds.
        expected_s: work that the rank would have had at the speed of the median.
    """

    is_slow: bool = False
    differs_s: float | None = None
    slow_s: float = 0.0
    work_s: float = 0.0
    expected_s: float = 0.0

    @property
    def factor(self) -> float:
        """Returns work divided by expected work; 1 if the rank was not slow."""
        return self.work_s / self.expected_s if self.expected_s > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that is named as slow.

    Attributes:
        rank: the slow rank.
        host: name of the host of this rank.
        factor: work of this rank divided by the work at the speed of the median.
        seconds: seconds for which this rank has been slow.
    """

    rank: int
    host: str
    factor: float
    seconds: float


class SlowRanks:
    """The ranks that are slow now, for the progress line; a resource of the world.

    Attributes:
        ranks: the slow ranks, the slowest first.
    """

    def __init__(self) -> None:
        self.ranks: tuple[SlowRank, ...] = ()

    def close(self) -> None:
        """Does nothing: there are no threads or sockets."""


def expected_work(times: Mapping[int, Times]) -> dict[int, float]:
    """Returns the work that each rank would have at the speed of the median.

    Args:
        times: rank → times.

    Returns:
        Rank → seconds: the median of the work per sample, times the rank's `samples`.

    Example:
        >>> expected_work({0: Times(9, 4.0), 1: Times(9, 3.0), 2: Times(9, 9.0)})
        {0: 4.0, 1: 4.0, 2: 4.0}
        >>> expected_work({0: Times(9, 8.0, samples=2), 1: Times(9, 3.0)})
        {0: 6.0, 1: 3.0}
    """
    speeds = sorted(one.work_s / one.samples for one in times.values())
    if not speeds:
        return {}
    median = speeds[(len(speeds) - 1) // 2]
    return {rank: median * one.samples for rank, one in times.items()}


def is_slow(times: Times, expected_s: float, factor: float) -> bool:
    """Returns whether a rank was slow between two comparisons.

    Args:
        times: times of the rank.
        expected_s: work of the rank at the speed of the median, in seconds.
        factor: smallest ratio of work to `expected_s` at which a rank is slow.

    Example:
        >>> is_slow(Times(10.0, 9.0), 5.0, factor=1.5)
        True
        >>> is_slow(Times(10.0, 0.9), 0.5, factor=1.5)  # the others lose 4 %
        False
    """
    lost_s = times.work_s - expected_s
    is_felt = lost_s >= _LEAST_SHARE * times.elapsed_s
    return times.elapsed_s > 0 and is_felt and times.work_s >= factor * expected_s


def compare(
    standings: Mapping[int, Standing],
    times: Mapping[int, Times],
    *,
    factor: float,
    seconds: float,
) -> dict[int, Standing]:
    """Returns the standings after one more comparison.

    A rank is named as slow when consecutive comparisons have found it slow for
    `seconds`. It is no longer named when consecutive comparisons have found it not slow
    for as long. The time before the first of these comparisons does not count, so that
    a rank is not named for a single pause, however long.

    Args:
        standings: rank → standing so far; ranks that are missing have no history.
        times: rank → times since the last comparison. Ranks that are missing, because
            their data have ended, keep their standing.
        factor: smallest ratio of work to expected work at which a rank is slow.
        seconds: seconds for which a rank has to be slow before it is named.

    Example:
        >>> times = {0: Times(5.0, 2.0), 1: Times(5.0, 4.5)}
        >>> found = {}
        >>> for _ in range(3):
        ...     found = compare(found, times, factor=1.5, seconds=10)
        >>> found[0].is_slow, found[1].is_slow, found[1].factor
        (False, True, 2.25)
    """
    expected = expected_work(times)
    found = dict(standings)
    for rank, own in times.items():
        before = found.get(rank, Standing())
        was_slow = is_slow(own, expected[rank], factor)
        found[rank] = _next(before, own, expected[rank], was_slow, seconds)
    return found


def _next(
    before: Standing, own: Times, expected_s: float, was_slow: bool, seconds: float
) -> Standing:
    differs_s = None
    if was_slow != before.is_slow:
        before_s = before.differs_s
        differs_s = 0.0 if before_s is None else before_s + own.elapsed_s
    changes = differs_s is not None and differs_s >= seconds
    after = dataclasses.replace(
        before,
        is_slow=was_slow if changes else before.is_slow,
        differs_s=None if changes else differs_s,
    )
    if was_slow:
        return dataclasses.replace(
            after,
            slow_s=before.slow_s + own.elapsed_s,
            work_s=before.work_s + own.work_s,
            expected_s=before.expected_s + expected_s,
        )
    # A rank that was named keeps its numbers, for the message at the end.
    return after if before.is_slow else Standing()


def steps_to_next(steps: int, elapsed_s: float, seconds: float) -> int:
    """Returns the number of steps until the next comparison.

    Args:
        steps: number of steps since the last comparison.
        elapsed_s: duration of these steps in seconds, equal on all ranks.
        seconds: time in seconds after which a slow rank is named. If the steps are
            short enough, comparisons are at most a sixth of this time and at most five
            seconds apart.

    Returns:
        At least 1, and at most twice as many steps as before.

    Example:
        >>> [steps_to_next(n, n * 0.1, 30.0) for n in (1, 32, 100)]
        [2, 50, 50]
        >>> steps_to_next(1, 60.0, 30.0)
        1
    """
    wanted_s = min(_MOST_BETWEEN_S, seconds / _COMPARISONS)
    wanted = 2 * steps if elapsed_s <= 0 else round(steps * wanted_s / elapsed_s)
    return max(1, min(2 * steps, wanted))
