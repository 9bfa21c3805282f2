"""Process sets: collectives of a subset of the ranks.

All ranks of the job create a set together, including ranks that are not members. After
that, only members make calls with `process_set=`. Sets may overlap, and operations of
different sets never wait for each other. This module does not need TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.core import engines, native, runtime
from tfdist.core.deadlock import one_rank_code

__all__ = ["ProcessSet", "add_process_set", "process_sets", "remove_process_set"]


@dataclass(frozen=True)
class ProcessSet:
    """A subset of the ranks of the job, created by `add_process_set` or `init`.

    A set has the same `ranks` and `id` on all ranks. A `tf.function` that takes a set
    as an argument is traced separately for each set. A set exists until
    `remove_process_set` or `shutdown`; using it later raises an error.

    Attributes:
        ranks: ranks of the members in the job, ascending.
        id: number of the set, equal on all ranks.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> alone = tfdist.add_process_set([0])
        >>> alone.ranks, alone.size(), alone.rank(), alone.included()
        ((0,), 1, 0, True)
    """

    ranks: tuple[int, ...]
    id: int
    generation: int = field(repr=False)

    def size(self) -> int:
        """Returns the number of members."""
        return len(self.ranks)

    def included(self) -> bool:
        """Returns whether this process is a member.

        Raises:
            tfdist.NotInitializedError: `tfdist.init()` has not been called.
        """
        return runtime.rank() in self.ranks

    def rank(self) -> int:
        """Returns the index of this process among the members: 0 <= rank < size().

        Raises:
            ValueError: this process is not a member.
            tfdist.NotInitializedError: `tfdist.init()` has not been called.
        """
        own = runtime.rank()
        if own not in self.ranks:
            raise ValueError(
                "Expected rank() to be called on a member of the process set of ranks "
                f"{list(self.ranks)}, got rank {own}. Check included() first."
            )
        return self.ranks.index(own)


def add_process_set(
    ranks: Iterable[int], *, timeout_s: float | None = None
) -> ProcessSet:
    """Creates a process set; every rank of the job calls it with the same list.

    Args:
        ranks: ranks of the members in the job, ascending, each once; at least one.
        timeout_s: seconds to wait for the other ranks; default `TFDIST_TIMEOUT_S`.

    Returns:
        The process set. A later call with the same list returns an equal set.

    Raises:
        TypeError: an entry of the list is not an integer.
        ValueError: `timeout_s` is not above 0.
        tf.errors.InvalidArgumentError: on every rank, if the list is empty, not
            ascending, or has a rank that does not exist.
        tfdist.MismatchError: the lists of the ranks differ; the message names the ranks
            and their lists.
        tfdist.TimeoutError: a rank did not make the call in time.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.add_process_set([0]).size()
        1
    """
    runtime.check_initialized()
    try:
        return add(ranks, timeout_s=timeout_s)
    except native.CoreError as error:
        runtime.raise_public(error)


def add(ranks: Iterable[int], *, timeout_s: float | None = None) -> ProcessSet:
    """As `add_process_set`, but raises `CoreError`, which does not need TensorFlow."""
    items = list(ranks)
    for rank in items:
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise TypeError(
                f"Expected a process set to be a list of ranks, got {rank!r} in "
                f"{items!r}."
            )
    members = tuple(int(rank) for rank in items)
    one_rank_code.check_not_alone("tfdist.add_process_set")
    number = native.add_process_set(members, timeout_s=native.timeout_of(timeout_s))
    process_set = ProcessSet(members, number, runtime.generation())
    live = runtime.live_sets()
    if process_set not in live:
        engine = engines.chosen()
        if engine is not None:
            engine.add_process_set(number, members)
        live.append(process_set)
    return process_set


def remove_process_set(
    process_set: ProcessSet, *, timeout_s: float | None = None
) -> None:
    """Removes a process set; every rank of the job calls it.

    Args:
        process_set: set returned by `add_process_set`.
        timeout_s: seconds to wait for the other ranks; default `TFDIST_TIMEOUT_S`.

    Raises:
        TypeError: `process_set` is not a `ProcessSet`.
        ValueError: the set was already removed, or was created before the last
            `shutdown()`, or `timeout_s` is not above 0.
        tfdist.MismatchError: on every rank, if a rank still runs operations of the set,
            or if the ranks try to remove different sets.
        tfdist.TimeoutError: a rank did not make the call in time.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.remove_process_set(tfdist.add_process_set([0]))
    """
    number = id_of(process_set)
    if number == 0:
        raise TypeError(
            "Expected a tfdist.ProcessSet, got None, which stands for all ranks and "
            "cannot be removed."
        )
    wait_s = native.timeout_of(timeout_s)
    one_rank_code.check_not_alone("tfdist.remove_process_set")
    try:
        native.remove_process_set(number, timeout_s=wait_s)
    except native.CoreError as error:
        runtime.raise_public(error)
    engine = engines.chosen()
    if engine is not None:
        engine.remove_process_set(number)
    runtime.live_sets().remove(process_set)


def process_sets() -> list[ProcessSet]:
    """Returns the current process sets, in the order in which they were added.

    Raises:
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tfdist
        >>> tfdist.init(process_sets=[[0]])
        >>> [s.ranks for s in tfdist.process_sets()]
        [(0,)]
    """
    runtime.check_initialized()
    return list(runtime.live_sets())


def id_of(process_set: Any) -> int:
    """Returns a process set's number in the core; 0 for None, which means all ranks.

    Raises:
        TypeError: `process_set` is neither a `ProcessSet` nor None.
        ValueError: the process set no longer exists.
    """
    if process_set is None:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            "Expected process_set to be a tfdist.ProcessSet or None, got "
            f"{process_set!r}. Create one with tfdist.add_process_set(ranks)."
        )
    topology = runtime.check_initialized()
    if process_set not in runtime.live_sets():
        earlier = process_set.generation != runtime.generation()
        why = "belongs to an earlier tfdist.init()" if earlier else "was removed"
        raise ValueError(
            f"The process set of ranks {list(process_set.ranks)} {why}. Create a new "
            f"one with tfdist.add_process_set(ranks) on all {topology.size} ranks."
        )
    return process_set.id


def members_of(process_set: ProcessSet | None) -> Sequence[int]:
    """Returns a set's members, as ranks of the job; all ranks for None."""
    id_of(process_set)
    return range(runtime.size()) if process_set is None else process_set.ranks


def check_root(root: int, process_set: ProcessSet | None) -> Sequence[int]:
    """Returns the ranks of a set, after checking that `root` is one of them.

    Raises:
        ValueError: `root` is not in the set.
    """
    members = members_of(process_set)
    if root not in members:
        expected = (
            f"root to be in 0..{len(members) - 1}"
            if process_set is None
            else f"root to be one of the ranks {list(members)} of the process set"
        )
        raise ValueError(f"Expected {expected}, got {root}.")
    return members
