"""Determines the slowest rank: the rank for which the others wait.

In an operation that needs all ranks, rank i is ready at t_i and waits T - t_i for the
last rank, where T = max t_i. Over many operations,

    W_i = sum (T - t_i)

where overlapping waits are counted once (tfdist_ops/scheduler/wait_accounting.h). So
the rank with the smallest W was the latest in total. This holds for every algorithm,
even if most ranks wait for the slowest rank only indirectly, as in a ring. The cost of
the slowest rank is the additional time that the other ranks wait, (mean of the other
W_i) - W_slowest.
"""

from __future__ import annotations

from collections.abc import Mapping


def slowest(waited_s: Mapping[int, float]) -> tuple[int | None, float]:
    """Returns the rank for which the others have waited.

    Args:
        waited_s: how long each rank has waited for others: rank → seconds, or any other
            unit.

    Returns:
        The rank, and how long the others have waited for it on average, in the unit of
        the argument. Of equally slow ranks, the lowest is returned. None and 0 for
        fewer than two ranks.

    Example:
        >>> slowest({0: 2.9, 1: 0.1, 2: 3.1})
        (1, 2.9)
    """
    if len(waited_s) < 2:
        return None, 0.0
    rank = min(waited_s, key=lambda r: (waited_s[r], r))
    others = [s for r, s in waited_s.items() if r != rank]
    return rank, sum(others) / len(others) - waited_s[rank]
