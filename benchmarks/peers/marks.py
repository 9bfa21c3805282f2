"""Decides whether measured rounds meet a mark, which is a required ratio of times.

Both times of a ratio are of the same round, so that what slows the machine down in a
round slows both. Higher ratios are better. A mark is met when the median of the rounds'
ratios is at least the required one and at most one round is worse than 1.0, or than the
required ratio if that is less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 0.2  # of the control, before a round is discarded
ENOUGH_ROUNDS = 7
WORSE_ALLOWED = 1

# A peer and its case.
Cell = tuple[str, str]


@dataclass(frozen=True)
class Round:
    """The results of one round.

    Attributes:
        times: peer and case → median seconds.
        add_gb_s: rate of d = a + b of one of the busy processes; S in `limit_gb_s`.
        copy_gb_s: likewise, rate of memcpy; C in `limit_gb_s`.
    """

    times: Mapping[Cell, float]
    add_gb_s: float
    copy_gb_s: float

    def fastest(self, cells: Iterable[Cell]) -> float | None:
        """Seconds of the fastest; None where none was measured."""
        return min((self.times[c] for c in cells if c in self.times), default=None)

    def ratio(self, others: Iterable[Cell], own: Cell) -> float | None:
        """How many times faster `own` is than the fastest of the others."""
        best, mine = self.fastest(others), self.times.get(own)
        return best / mine if best and mine else None


@dataclass(frozen=True)
class Mark:
    """A ratio, None for rounds that do not have it, and how large it has to be."""

    title: str
    required: float
    ratio: Callable[[Round], float | None]


@dataclass(frozen=True)
class Verdict:
    """The statistics of a mark over the rounds.

    Attributes:
        rounds: how many have the ratio.
        worse: how many of them are below 1.0, or below a requirement under 1.0.
        met: whether the mark is met, even if `rounds` are too few to be sure.
    """

    rounds: int
    median: float
    low: float
    high: float
    worse: int
    met: bool


def limit_gb_s(add_gb_s: float, copy_gb_s: float, ranks: int = 2) -> float:
    """GB/s that an allreduce within one host can reach.

    Each of K ranks reduces its part of the vector: it reads K parts and writes one.
    d = a + b, at the rate S, reads two and writes one. Then the rank copies the other
    K - 1 parts at the rate C. The limit is 1 / ((K + 1) / 3KS + (K - 1) / KC), for two
    ranks 1 / (1/2S + 1/2C).

    Args:
        add_gb_s: S of one process while all are busy.
        copy_gb_s: C, likewise.
        ranks: K.

    Example:
        >>> limit_gb_s(2.0, 4.0)
        2.6666666666666665
    """
    reducing = (ranks + 1) / (3 * ranks) / add_gb_s
    return 1 / (reducing + (ranks - 1) / ranks / copy_gb_s)


def quantile(values: Sequence[float], part: float) -> float:
    """The quantile `part` of the values, interpolated linearly."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def discarded(
    controls: Mapping[int, Sequence[float]], tolerance: float = TOLERANCE
) -> set[int]:
    """The rounds in which the machine was unusually fast or slow.

    Args:
        controls: by round, all rates that its controls have measured.
        tolerance: 0.2 is 20 %.

    Returns:
        Rounds with a rate that is off the median of all rates by more than that.
    """
    every = [rate for rates in controls.values() for rate in rates]
    if not every:
        return set()
    middle = statistics.median(every)
    return {
        number
        for number, rates in controls.items()
        if any(abs(rate / middle - 1) > tolerance for rate in rates)
    }


def verdict(ratios: Sequence[float], required: float) -> Verdict | None:
    """Reads a mark from its ratios; None without any."""
    if not ratios:
        return None
    worse = sum(ratio < min(1.0, required) for ratio in ratios)
    median = statistics.median(ratios)
    return Verdict(
        rounds=len(ratios),
        median=median,
        low=quantile(ratios, 0.1),
        high=quantile(ratios, 0.9),
        worse=worse,
        met=median >= required and worse <= WORSE_ALLOWED,
    )


def read(mark: Mark, rounds: Iterable[Round]) -> Verdict | None:
    """The verdict of the rounds that have what the mark needs."""
    ratios = [mark.ratio(one) for one in rounds]
    return verdict([ratio for ratio in ratios if ratio is not None], mark.required)
