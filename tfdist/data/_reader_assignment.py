"""Assignment of a reader, a rank that reads the data, to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Thing = TypeVar("_Thing")


def reader_of(host_of: Sequence[int], readers: int) -> list[int]:
    """Returns the rank that reads for each rank.

    Ranks are ordered by host and divided into contiguous groups; the first rank of each
    group reads for the group. With as many readers as hosts, each group consists of the
    ranks of one host. With fewer readers, a group consists of the ranks of one or more
    consecutive hosts. With more readers, the ranks of a host are divided evenly into
    groups.

    Args:
        host_of: for each rank, the index of its host.
        readers: number of ranks that read, from 1 to the number of ranks.

    Returns:
        The reader of each rank. A rank that reads is its own reader.

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
    """Cuts a list into contiguous parts of nearly equal length, longer parts first."""
    short, longer = divmod(len(things), parts)
    found = []
    start = 0
    for index in range(parts):
        end = start + short + (index < longer)
        found.append(things[start:end])
        start = end
    return found
