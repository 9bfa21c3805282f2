"""Which ranks read, and for whom: a pure function of hosts and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Thing = TypeVar("_Thing")


def reader_of(host_of: Sequence[int], readers: int) -> list[int]:
    """Returns the rank that reads for each rank.

    Ranks are taken host by host. With as many readers as hosts the first rank of each
    host reads for its host; with fewer, for whole neighbouring hosts; with more, the
    ranks of a host are cut evenly. Each run of ranks is contiguous in that order, and
    its first rank reads.

    Args:
        host_of: index of the host of each rank.
        readers: how many ranks read, at least 1 and at most all.

    Returns:
        For each rank its reader; a reader is its own.

    Example:
        >>> reader_of([0, 0, 0, 0], 2)
        [0, 0, 2, 2]
        >>> reader_of([0, 0, 1, 1, 2, 2], 3)
        [0, 0, 2, 2, 4, 4]
        >>> reader_of([0, 0, 1, 1, 2, 2], 4)
        [0, 1, 2, 2, 4, 4]
    """
    hosts = [
        [rank for rank, host in enumerate(host_of) if host == index]
        for index in sorted(set(host_of))
    ]
    if readers <= len(hosts):
        runs = [
            [rank for ranks in some for rank in ranks] for some in _cut(hosts, readers)
        ]
    else:
        shares = [1] * len(hosts)
        for _ in range(readers - len(hosts)):
            loads = [
                len(ranks) / share for ranks, share in zip(hosts, shares, strict=True)
            ]
            shares[loads.index(max(loads))] += 1
        runs = [
            run
            for ranks, share in zip(hosts, shares, strict=True)
            for run in _cut(ranks, share)
        ]
    found = [0] * len(host_of)
    for run in runs:
        for rank in run:
            found[rank] = run[0]
    return found


def _cut(things: list[_Thing], parts: int) -> list[list[_Thing]]:
    """Contiguous parts whose lengths differ by one at most; the longer ones first."""
    short, longer = divmod(len(things), parts)
    found = []
    start = 0
    for index in range(parts):
        end = start + short + (index < longer)
        found.append(things[start:end])
        start = end
    return found
