"""Measures training steps with totals, a moving window, and values of all ranks."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

_POINT_S = 0.25  # step by which the window moves


class Totals(NamedTuple):
    """Sums over training steps.

    Attributes:
        steps: number of steps.
        seconds: duration of these steps.
        watched_s: part of `seconds` in which communication was measured.
        exposed_s: part of `watched_s` in which steps waited for gradients.
    """

    steps: float = 0
    seconds: float = 0.0
    watched_s: float = 0.0
    exposed_s: float = 0.0

    def plus(self, other: Totals, sign: int = 1) -> Totals:
        """Returns the sum of both totals, or with a `sign` of -1 the difference."""
        return Totals._make(a + sign * b for a, b in zip(self, other, strict=True))

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second; None if nothing was measured."""
        return self.steps / self.seconds if self.seconds > 0 else None

    @property
    def exposed(self) -> float | None:
        """Share of exposed communication, 0..1; None if nothing was measured."""
        if self.watched_s <= 0:
            return None
        return min(1.0, self.exposed_s / self.watched_s)


class Window:
    """The totals of the last seconds of training.

    Totals do not include time without training (validation, saving), so a pause does
    not look like a slow step.

    Args:
        seconds: seconds of training that the window covers.

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
        """Adds one or more steps."""
        self._all = self._all.plus(totals)
        oldest_s = self._all.seconds - self._seconds
        while len(self._points) > 1 and self._points[1].seconds <= oldest_s:
            self._points.popleft()
        if self._all.seconds - self._points[-1].seconds >= _POINT_S:
            self._points.append(self._all)

    @property
    def recent(self) -> Totals:
        """The totals of the window."""
        return self._all.plus(self._points[0], -1)


def seconds_left(
    *,
    steps: int | None,
    steps_per_s: float | None,
    epoch_ends: int,
    pauses_s: Sequence[float],
) -> float | None:
    """Estimates the time until the training ends; None if it cannot be known.

    Args:
        steps: remaining steps in all epochs.
        steps_per_s: current speed.
        epoch_ends: number of epochs that have not ended yet.
        pauses_s: measured seconds between two epochs (validation, saving).

    Example:
        >>> seconds_left(steps=100, steps_per_s=2.0, epoch_ends=3, pauses_s=[3.0, 5.0])
        62.0
    """
    if steps is None or not steps_per_s:
        return None
    pause_s = sum(pauses_s) / len(pauses_s) if pauses_s else 0.0
    return steps / steps_per_s + epoch_ends * pause_s


def of_all_ranks(
    own: Sequence[Sequence[float]],
) -> tuple[float | None, float | None]:
    """Combines the measurements of all ranks.

    Args:
        own: samples, seconds, watched seconds and exposed seconds for each rank; zeros
            for a rank without data.

    Returns:
        Samples of all ranks divided by the seconds of the slowest rank, and the share
        of exposed communication in the watched time of all ranks. Each is None if
        nothing was measured.

    Example:
        >>> of_all_ranks([(100, 2.0, 2.0, 0.5), (100, 2.5, 2.0, 0.1)])
        (80.0, 0.15)
    """
    samples, seconds, watched_s, exposed_s = zip(*own, strict=True)
    total = Totals(sum(samples), max(seconds), sum(watched_s), sum(exposed_s))
    return total.steps_per_s, total.exposed
