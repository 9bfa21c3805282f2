"""Pure functions that compute a tuning file from measured times.

The time of an algorithm for n bytes is modeled as alpha + n beta, as in the cost models
of R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication
Operations in MPICH*, Int. J. High Perform. Comput. Appl. 19 (2005). alpha and beta are
fitted to the measured times of each algorithm. The algorithm for each measured size is
chosen by the measured times; the fitted lines determine the crossover between two
measured sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.core import tuning

# A change of algorithm must gain at least this factor in total. The chosen algorithm is
# therefore slower than the best by at most this factor twice (a change to the best
# algorithm and back), 1.1 * 1.1, which is less than GOOD.
_SWITCH = math.log(1.1)
GOOD = 1.25

Times = Mapping[str, Mapping[int, float]]  # algorithm → bytes → seconds


@dataclass(frozen=True)
class Line:
    """Time model with alpha in seconds and beta in seconds per byte."""

    alpha: float
    beta: float

    def at(self, size_bytes: int) -> float:
        """Returns the seconds for a size in bytes."""
        return self.alpha + size_bytes * self.beta


@dataclass(frozen=True)
class Choice:
    """Algorithms chosen by size, and a comparison with the best algorithms.

    Attributes:
        sizes: pairs of largest size in bytes and algorithm; the last size is None,
            which means no limit.
        ratios: for each measured size, the time of the chosen algorithm divided by the
            best time.
        lines: the fitted line of each algorithm.
    """

    sizes: tuple[tuple[int | None, str], ...]
    ratios: Mapping[int, float]
    lines: Mapping[str, Line]

    def at(self, size_bytes: int) -> str:
        """Returns the algorithm chosen for a size in bytes."""
        for limit, name in self.sizes:
            if limit is None or size_bytes <= limit:
                return name
        raise AssertionError("the last entry has no size limit")

    @property
    def worst(self) -> tuple[float, int]:
        """Returns the largest ratio and its size."""
        return max((ratio, size) for size, ratio in self.ratios.items())


def fit(times: Mapping[int, float]) -> Line:
    """Returns the line with the least sum of absolute relative errors.

    This criterion is robust to outliers. The best line passes through two of the
    points, so all pairs are tried; there are at most a few dozen points. alpha and beta
    are at least 0.

    Args:
        times: seconds by size in bytes, with at least one entry.
    """
    points = sorted(times.items())
    lines = [Line(seconds, 0.0) for _, seconds in points]
    lines += [Line(0.0, seconds / size) for size, seconds in points if size > 0]
    for (small, early), (large, late) in itertools.combinations(points, 2):
        beta = (late - early) / (large - small)
        alpha = early - beta * small
        if alpha >= 0.0 and beta >= 0.0:
            lines.append(Line(alpha, beta))
    return min(
        lines, key=lambda line: sum(abs(line.at(n) / t - 1.0) for n, t in points)
    )


def _best_path(times: Times, sizes: Sequence[int]) -> list[str]:
    """Returns the algorithm for each size, with the least cost of times and changes."""
    names = sorted(times)
    cost = dict.fromkeys(names, 0.0)
    came_from: list[dict[str, str]] = []
    for index, size in enumerate(sizes):
        best = min(times[name][size] for name in names)
        cheapest = min(names, key=lambda name: (cost[name], name))
        previous, after = {}, {}
        for name in names:
            stays = index == 0 or cost[name] <= cost[cheapest] + _SWITCH
            previous[name] = name if stays else cheapest
            before = cost[name] if stays else cost[cheapest] + _SWITCH
            after[name] = before + math.log(times[name][size] / best)
        cost = after
        came_from.append(previous)
    name = min(names, key=lambda name: (cost[name], name))
    path = []
    for previous in reversed(came_from):
        path.append(name)
        name = previous[name]
    return path[::-1]


def _border(small: int, large: int, first: Line, second: Line) -> int:
    """Returns the largest size for the first algorithm, in `small` to `large` - 1."""
    if first.beta > second.beta:
        crossing = (second.alpha - first.alpha) / (first.beta - second.beta)
        if small <= crossing < large:
            return int(crossing)
    return min(int(math.sqrt(small * large)), large - 1)


def choose(times: Times) -> Choice:
    """Chooses an algorithm for each range of sizes.

    Args:
        times: times of all algorithms at the same sizes; at least one size.
    """
    sizes = sorted(next(iter(times.values())))
    lines = {name: fit(measured) for name, measured in times.items()}
    path = _best_path(times, sizes)
    limits: list[tuple[int | None, str]] = []
    for index, name in enumerate(path[:-1]):
        after = path[index + 1]
        if name != after:
            border = _border(sizes[index], sizes[index + 1], lines[name], lines[after])
            limits.append((border, name))
    limits.append((None, path[-1]))
    ratios = {
        size: times[name][size] / min(found[size] for found in times.values())
        for size, name in zip(sizes, path, strict=True)
    }
    return Choice(tuple(limits), ratios, lines)


def row(
    operation: str, hosts: Sequence[int], half: bool, choice: Choice
) -> dict[str, object]:
    """Returns a row of a tuning file (`tfdist.core.tuning`)."""
    return {
        "operation": operation,
        "hosts": list(hosts),
        "half_types": half,
        "sizes": [
            {"up_to_bytes": limit, "algorithm": name} for limit, name in choice.sizes
        ],
    }


def document(
    rows: Sequence[Mapping[str, object]], measured: Mapping[str, object]
) -> dict[str, object]:
    """Returns a tuning file."""
    return {
        "format": tuning.FORMAT,
        "version": tuning.VERSION,
        "measured": dict(measured),
        "rows": list(rows),
    }


def _size_text(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "above"
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"up to {size_bytes / scale:.4g} {unit}"
    return f"up to {size_bytes} B"


def explain(operation: str, dtype: str, choice: Choice) -> list[str]:
    """Returns lines of text that describe fitted times and chosen algorithms."""
    lines = [f"# {operation} {dtype}:"]
    for name, line in sorted(choice.lines.items()):
        rate = f"{1e-9 / line.beta:.3f} GB/s" if line.beta > 0 else "-"
        lines.append(f"#   {name:<18} alpha {line.alpha * 1e6:>9.1f} us, {rate:>12}")
    summary = ", ".join(f"{_size_text(limit)}: {name}" for limit, name in choice.sizes)
    if len(choice.sizes) == 1:
        summary = f"{choice.sizes[0][1]} at every size"
    ratio, size = choice.worst
    verdict = "within" if ratio <= GOOD else "NOT within"
    lines.append(f"#   chosen: {summary}")
    lines.append(
        f"#   {verdict} {GOOD} of the best at every size; worst {ratio:.2f} at {size} B"
    )
    return lines
