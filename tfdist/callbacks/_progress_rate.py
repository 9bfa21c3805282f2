"""How fast a training goes, and how long it will take: sums and a moving window."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

_POINT_S = 0.25  # the window moves in steps of this


@dataclasses.dataclass(frozen=True)
class Totals:
    """Accumulated measurements of training steps.

    Attributes:
        steps: steps of training.
        seconds: which they took.
        watched_s: the part of `seconds` in which communication was measured.
        exposed_s: the part of `watched_s` that was spent waiting for gradients.
    """

    steps: int = 0
    seconds: float = 0.0
    watched_s: float = 0.0
    exposed_s: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.watched_s + other.watched_s,
            self.exposed_s + other.exposed_s,
        )

    def __sub__(self, other: Totals) -> Totals:
        return Totals(
            self.steps - other.steps,
            self.seconds - other.seconds,
            self.watched_s - other.watched_s,
            self.exposed_s - other.exposed_s,
        )

    @property
    def steps_per_s(self) -> float | None:
        """Speed; None while nothing was measured."""
        return self.steps / self.seconds if self.seconds > 0 else None

    @property
    def exposed(self) -> float | None:
        """Share of exposed communication, 0..1; None while nothing was measured."""
        if self.watched_s <= 0:
            return None
        return min(1.0, self.exposed_s / self.watched_s)


class Window:
    """The totals of the last while.

    Time in which nothing was trained (validation, saving) is in no total, so a pause
    does not look like a slow step.

    Args:
        seconds: of training that the window covers.

    Example:
        >>> window = Window(10.0)
        >>> for _ in range(100):
        ...     window.add(Totals(steps=1, seconds=0.5))
        >>> window.recent.steps_per_s, window.recent.seconds
        (2.0, 10.0)
    """

    def __init__(self, seconds: float = 20.0) -> None:
        self._seconds = seconds
        self._all = Totals()
        self._points = collections.deque([self._all])  # spaced by _POINT_S or more

    def add(self, totals: Totals) -> None:
        """Counts one more step, or several."""
        self._all += totals
        while (
            len(self._points) > 1
            and self._all.seconds - self._points[1].seconds >= self._seconds
        ):
            self._points.popleft()
        if self._all.seconds - self._points[-1].seconds >= _POINT_S:
            self._points.append(self._all)

    @property
    def recent(self) -> Totals:
        """Of the window."""
        return self._all - self._points[0]


def seconds_left(
    *,
    steps: int | None,
    steps_per_s: float | None,
    epoch_ends: int,
    pause_s: float,
) -> float | None:
    """Estimates how long the rest of the training takes.

    Args:
        steps: that are left in all epochs; None where nobody knows.
        steps_per_s: at present; None before anything was measured.
        epoch_ends: how many epochs have still to end.
        pause_s: what lies between two epochs (validation, saving), seconds.

    Returns:
        Seconds, None where it cannot be told.

    Example:
        >>> seconds_left(steps=100, steps_per_s=2.0, epoch_ends=3, pause_s=4.0)
        62.0
    """
    if steps is None or not steps_per_s:
        return None
    return steps / steps_per_s + epoch_ends * pause_s


def of_all_ranks(
    own: Sequence[Sequence[float]],
) -> tuple[float | None, float | None]:
    """The numbers of an epoch, from those of each rank.

    Args:
        own: for each rank its samples, seconds, watched and exposed seconds; 0 for a
            rank without data.

    Returns:
        Samples of all ranks in a second (the slowest rank's second), and the share of
        exposed communication in the time of all ranks; each None where nothing was
        measured.

    Example:
        >>> of_all_ranks([(100, 2.0, 2.0, 0.5), (100, 2.5, 2.0, 0.1)])
        (80.0, 0.15)
    """
    samples, seconds, watched_s, exposed_s = zip(*own, strict=True)
    longest_s, all_watched_s = max(seconds), sum(watched_s)
    speed = sum(samples) / longest_s if longest_s > 0 else None
    share = min(1.0, sum(exposed_s) / all_watched_s) if all_watched_s > 0 else None
    return speed, share
