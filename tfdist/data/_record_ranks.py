"""The index of many files, made by all ranks together.

Rank r goes through the files r, r + size, ..., and the parts are exchanged: the cost
falls with the ranks, and all have the same index because it is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tfdist import collectives
from tfdist.collectives.all_ranks import CoordinatedCall
from tfdist.core import runtime
from tfdist.data import _record_index as indexing
from tfdist.data._record_cache import Cache

T = TypeVar("T")


def group_of(
    function: str, together: bool, timeout_s: float | None
) -> CoordinatedCall | None:
    """All ranks, where there are others and they are to take part."""
    if not together or not runtime.is_initialized() or runtime.size() == 1:
        return None
    return CoordinatedCall(function, timeout_s, None)


def agreed_paths(
    group: CoordinatedCall | None, look: Callable[[], tuple[str, ...]]
) -> tuple[str, ...]:
    """The names of the files, once all ranks have checked and compared theirs.

    Args:
        group: all ranks, or None: this one alone.
        look: gives the names, or raises.

    Returns:
        The names.

    Raises:
        tfdist.MismatchError: the ranks have different files, or another order.
    """

    def work() -> tuple[tuple[str, ...], dict[str, Any]]:
        paths = look()
        ends = f"{os.path.basename(paths[0])} to {os.path.basename(paths[-1])}"
        return paths, {
            "files": f"{len(paths)} files, {ends}, digest {indexing.digest(paths)}"
        }

    paths, facts = _stage(group, "the list of files", work)
    if group is not None:
        group.agree(
            facts,
            "files",
            "the list of files",
            "Give the same files in the same order on all ranks: sort what a folder "
            "or a pattern lists. together=False: each rank has files of its own.",
        )
    return paths


def build(
    group: CoordinatedCall | None,
    paths: tuple[str, ...],
    counts: Sequence[int] | None,
    cache: str | os.PathLike[str] | None,
) -> indexing.Index:
    """The index of the files, the same on all ranks.

    Args:
        group: all ranks, or None: this one alone.
        paths: the files, the same on all ranks.
        counts: records that each should hold, if that is known.
        cache: the file in which the first rank keeps the index, if anywhere; that of
            another rank is not used.
    """
    place, size = 0, 1
    if group is not None:
        place, size = group.ranks.index(runtime.rank()), len(group.ranks)

    def look() -> tuple[tuple[Cache | None, indexing.Index | None], dict[str, Any]]:
        given = None if cache is None else Cache(os.fsdecode(cache), paths)
        store = given if place == 0 else None
        found = None if store is None else store.read()
        return (store, found), {"keeps": store is not None, "kept": found is not None}

    (store, known), facts = _stage(group, "the cache of the index", look)
    keeps, kept = facts[0]["keeps"], facts[0]["kept"]
    # Whose part which files are: the first rank gives what it has kept, else all work.
    shares = [range(r, len(paths), size) for r in range(size)]
    if kept:
        shares = [range(len(paths)), *[range(0)] * (size - 1)]

    def work() -> tuple[indexing.Index, dict[str, Any]]:
        share = [paths[i] for i in shares[place]]
        index = known
        if index is None:
            index = indexing.join(indexing.index_files(share))
        expected = None if counts is None else [counts[i] for i in shares[place]]
        indexing.check_counts(share, index.counts.tolist(), expected)
        return index, {"counts": index.counts}

    own, facts = _stage(group, "the index of the files", work)
    lengths = own.lengths
    if group is not None:
        lengths = collectives.allgather(
            lengths, name="data.Records", timeout_s=group.timeout_s
        ).numpy()
    index = merge(shares, [fact["counts"] for fact in facts], lengths)
    if keeps and not kept:

        def keep() -> tuple[None, dict[str, Any]]:
            if store is not None:
                store.write(index)
            return None, {}

        _stage(group, "writing the cache of the index", keep)
    return index


def merge(
    shares: Sequence[range], counts: Sequence[np.ndarray], lengths: np.ndarray
) -> indexing.Index:
    """Puts the parts of the ranks into the order of the files.

    Args:
        shares: of each rank: the files it went through.
        counts: of each rank: the records of each of these files.
        lengths: of all their records, rank after rank.

    Returns:
        The index of all files.

    Example:
        >>> index = merge([range(0, 3, 2), range(1, 3, 2)],
        ...               [np.array([1, 2]), np.array([1])], np.array([7, 9, 9, 8]))
        >>> index.counts.tolist(), index.lengths.tolist()
        ([1, 1, 2], [7, 8, 9, 9])
    """
    parts: dict[int, np.ndarray] = {}
    at = 0
    for share, numbers in zip(shares, counts, strict=True):
        for file, count in zip(share, numbers.tolist(), strict=True):
            parts[file] = lengths[at : at + count]
            at += count
    return indexing.join([parts[file] for file in sorted(parts)])


def _stage(
    group: CoordinatedCall | None,
    name: str,
    work: Callable[[], tuple[T, dict[str, Any]]],
) -> tuple[T, list[dict[str, Any]]]:
    """Does the work, and tells the other ranks if there are any."""
    if group is not None:
        return group.run(name, work)
    result, told = work()
    return result, [told]
