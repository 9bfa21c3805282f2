"""How a mark is read: ratios of the rounds, on values, without a machine.

A ratio is that of two times of one round, so that what slows the machine down in a
round slows both. It is written so that more is better. A mark is met when the median of
the rounds' ratios is at least what is required and at most one round is worse than
1.0, or than what is required where that is less.
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
    """What one round has measured.

    Attributes:
        times: peer and case → median seconds.
        add_gb_s: rate of d = a + b of one process, all at work; S of the limit.
        copy_gb_s: rate of memcpy; C of the limit.
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
    """A ratio and how large it has to be; None where a round does not have it."""

    title: str
    required: float
    ratio: Callable[[Round], float | None]


@dataclass(frozen=True)
class Verdict:
    """What the rounds say of a mark.

    Attributes:
        rounds: how many have the ratio.
        worse: how many of them are below 1.0, or below a requirement under 1.0.
        met: whether the mark is; `rounds` may be too few to believe it.
    """

    rounds: int
    median: float
    low: float
    high: float
    worse: int
    met: bool


def limit_gb_s(add_gb_s: float, copy_gb_s: float, ranks: int = 2) -> float:
    """Bytes a second that an allreduce in one host can reach.

    Each of K ranks reduces its part of the vector, K parts read and one written, where
    d = a + b at the rate S reads two and writes one, and copies the other parts at the
    rate C: 1 / ((K + 1) / 3KS + (K - 1) / KC). For two ranks this is 1 / (1/2S + 1/2C).

    Args:
        add_gb_s: S of one process, all of them at work.
        copy_gb_s: C, likewise.
        ranks: K.

    Example:
        >>> limit_gb_s(2.0, 4.0)
        2.6666666666666665
    """
    reducing = (ranks + 1) / (3 * ranks) / add_gb_s
    return 1 / (reducing + (ranks - 1) / ranks / copy_gb_s)


def quantile(values: Sequence[float], part: float) -> float:
    """Between the two nearest values, in proportion."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def discarded(
    controls: Mapping[int, Sequence[float]], tolerance: float = TOLERANCE
) -> set[int]:
    """The rounds in which the machine was another one.

    Args:
        controls: by round, all rates that its controls have measured.
        tolerance: 0.2 is 20 %.

    Returns:
        Rounds of which a rate is further than that off the median of all rounds.
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
