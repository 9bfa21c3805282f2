"""Builds the index of many files on all ranks together.

Rank r reads the files r, r + size, ..., and the ranks exchange the results. The cost
per rank therefore decreases with the number of ranks, and all ranks get the same index.
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


def coordinated_call(
    function: str, together: bool, timeout_s: float | None
) -> CoordinatedCall | None:
    """Returns the call that coordinates all ranks; None if this rank works alone."""
    if not together or not runtime.is_initialized() or runtime.size() == 1:
        return None
    return CoordinatedCall(function, timeout_s, None)


def agreed_paths(
    call: CoordinatedCall | None, look: Callable[[], tuple[str, ...]]
) -> tuple[str, ...]:
    """Returns this rank's file names, after comparing them between all ranks.

    Args:
        call: call that coordinates all ranks; None if this rank works alone.
        look: function that returns this rank's file names, or raises.

    Returns:
        The file names, equal on all ranks if `call` is not None.

    Raises:
        tfdist.MismatchError: the ranks have different files or different orders.
    """

    def work() -> tuple[tuple[str, ...], dict[str, Any]]:
        paths = look()
        ends = f"{os.path.basename(paths[0])} to {os.path.basename(paths[-1])}"
        return paths, {
            "files": f"{len(paths)} files, {ends}, digest {indexing.digest(paths)}"
        }

    paths, facts = _stage(call, "the list of files", work)
    if call is not None:
        call.agree(
            facts,
            "files",
            "the list of files",
            "Pass the same files in the same order on all ranks; sort names that come "
            "from a folder or pattern. If each rank has different files, pass "
            "together=False.",
        )
    return paths


def build(
    call: CoordinatedCall | None,
    paths: tuple[str, ...],
    counts: Sequence[int] | None,
    cache: str | os.PathLike[str] | None,
) -> indexing.Index:
    """Returns the index of the files, the same on all ranks.

    Args:
        call: call that coordinates all ranks; None if this rank works alone.
        paths: the files, the same on all ranks.
        counts: expected number of records in each file; None if unknown.
        cache: name of the file in which the first rank, or a rank that works alone,
            stores the index; None: the index is not stored. The names on the remaining
            ranks are ignored.
    """
    place, size = 0, 1
    if call is not None:
        place, size = call.ranks.index(runtime.rank()), len(call.ranks)

    def look() -> tuple[tuple[Cache | None, indexing.Index | None], dict[str, Any]]:
        given = None if cache is None else Cache(os.fsdecode(cache), paths)
        store = given if place == 0 else None
        found = None if store is None else store.read()
        return (store, found), {"keeps": store is not None, "kept": found is not None}

    (store, known), facts = _stage(call, "the cache of the index", look)
    keeps, kept = facts[0]["keeps"], facts[0]["kept"]
    # The indices of the files that each rank handles. If the first rank has found a
    # cached index, it handles all files.
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

    own, facts = _stage(call, "the index of the files", work)
    lengths = own.lengths
    if call is not None:
        lengths = collectives.allgather(
            lengths, name="data.Records", timeout_s=call.timeout_s
        ).numpy()
    index = merge(shares, [fact["counts"] for fact in facts], lengths)
    if keeps and not kept:

        def keep() -> tuple[None, dict[str, Any]]:
            if store is not None:
                store.write(index)
            return None, {}

        _stage(call, "writing the cache of the index", keep)
    return index


def merge(
    shares: Sequence[range], counts: Sequence[np.ndarray], lengths: np.ndarray
) -> indexing.Index:
    """Merges the ranks' parts of the index in the order of the files.

    Args:
        shares: for each rank, the indices of the files that it has read.
        counts: for each rank, the number of records in each of these files.
        lengths: lengths of all records, in the order of the ranks.

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
    call: CoordinatedCall | None,
    name: str,
    work: Callable[[], tuple[T, dict[str, Any]]],
) -> tuple[T, list[dict[str, Any]]]:
    """Calls `work` and exchanges the facts that it returns with the other ranks.

    Args:
        call: call that coordinates all ranks; None if this rank works alone.
        name: name of the stage, for messages.
        work: function that returns a result for this rank, and facts for all ranks.

    Returns:
        This rank's result, and the facts of all ranks in rank order.
    """
    if call is not None:
        return call.run(name, work)
    result, facts = work()
    return result, [facts]
