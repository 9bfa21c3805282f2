"""Horovod's process sets, implemented with those of tfdist.

A `ProcessSet` is created first and bound later, by `hvd.init` or `hvd.add_process_set`:
it then refers to a process set of tfdist. Ranks, including the root of a broadcast, are
ranks of the job.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import tfdist
from tfdist.core import runtime


class _Numbers:
    """Horovod's IDs of the process sets: 1, 2, ... in order of creation.

    The IDs of removed sets are reused for new sets, in the order of removal.
    `tfdist.ProcessSet.id` is a different number, which is never reused.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._of: dict[tfdist.ProcessSet, int] = {}
        self._free: collections.deque[int] = collections.deque()

    def all(self) -> dict[tfdist.ProcessSet, int]:
        """Returns the existing sets with their IDs."""
        live = tfdist.process_sets()
        if self._generation != runtime.generation():  # a new job after `shutdown`
            self._generation = runtime.generation()
            self._of.clear()
            self._free.clear()
        for gone in [one for one in self._of if one not in live]:
            self._free.append(self._of.pop(gone))
        for one in live:
            if one not in self._of:
                next_id = len(self._of) + 1
                self._of[one] = self._free.popleft() if self._free else next_id
        return self._of

    def of(self, process_set: tfdist.ProcessSet) -> int:
        """Returns the ID of an existing set."""
        return self.all()[process_set]


_numbers = _Numbers()


class ProcessSet:
    """A set of ranks; pass it to `hvd.init` or `hvd.add_process_set`.

    Args:
        ranks_or_comm: the ranks, in any order.

    Attributes:
        process_set_id: 1, 2, ... in the order in which sets are bound, the same on all
            ranks. None before the set is bound and after `remove_process_set`, which
            frees the ID for a new set.
        ranks: the members, ascending.
        mpi_comm: always None, since tfdist has no MPI communicators.

    Raises:
        ValueError: an entry of the list is not a rank, or an MPI communicator is given.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> alone = hvd.ProcessSet([0])
        >>> hvd.init()
        >>> hvd.add_process_set(alone).rank()
        0
        >>> hvd.remove_process_set(alone)
        True
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._made: tfdist.ProcessSet | None = None
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "Expected a list of ranks, got "
                f"{type(ranks_or_comm).__name__}: tfdist is not built with MPI and "
                "accepts no communicators. Write hvd.ProcessSet([0, 1, ...])."
            )
        listed = list(ranks_or_comm)
        for rank in listed:
            if isinstance(rank, bool) or not hasattr(rank, "__index__"):
                raise ValueError(
                    f"Expected a list of ranks, got {rank!r} in {listed!r}."
                )
        self.ranks = sorted(int(rank) for rank in listed)

    def size(self) -> int | None:
        """Returns the number of members; None before the set is bound."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Returns this process's index among the members; None before the set is bound.

        Raises:
            ValueError: this process is not a member.
        """
        if self.process_set_id is None:
            return None
        made = own(self)
        return tfdist.rank() if made is None else made.rank()

    def included(self) -> bool | None:
        """Returns whether this process is a member."""
        return None if self.ranks is None else tfdist.rank() in self.ranks

    def _bind(self, made: tfdist.ProcessSet) -> None:
        self._made, self.process_set_id = made, _numbers.of(made)

    def _invalidate(self) -> None:
        self._made = self.process_set_id = None

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks of the job."""

    process_set_id = 0

    def __init__(self) -> None:
        self._made = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(tfdist.size())) if tfdist.is_initialized() else []

    def size(self) -> int:
        """Returns the number of ranks.

        Raises:
            ValueError: `hvd.init()` has not been called.
        """
        check_initialized()
        return tfdist.size()

    def rank(self) -> int:
        """Returns the rank of this process.

        Raises:
            ValueError: `hvd.init()` has not been called.
        """
        check_initialized()
        return tfdist.rank()

    def included(self) -> bool:
        """Returns True: every rank is a member.

        Raises:
            ValueError: `hvd.init()` has not been called.
        """
        check_initialized()
        return True


global_process_set = _GlobalProcessSet()


def check_initialized() -> None:
    """Raises ValueError before `hvd.init()`."""
    if not tfdist.is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def own(process_set: Any) -> tfdist.ProcessSet | None:
    """Returns the tfdist process set for a Horovod process set; None: all ranks.

    Args:
        process_set: a bound `ProcessSet`, a tfdist process set, or None.

    Raises:
        TypeError: `process_set` has a different type.
        ValueError: the set is not bound.
    """
    if process_set is None or isinstance(process_set, tfdist.ProcessSet):
        return process_set
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"Expected an hvd.ProcessSet, got {process_set!r}.")
    if process_set.process_set_id == 0:
        return None
    if process_set._made is None:
        raise ValueError(
            f"The process set of ranks {process_set.ranks} is not initialized, or was "
            "removed. Pass it to hvd.init(process_sets=[...]) or "
            "hvd.add_process_set(...), on every rank."
        )
    return process_set._made


def bind(process_sets: Sequence[ProcessSet]) -> None:
    """Binds the sets of `hvd.init`; every rank calls it, with the same list.

    An InvalidArgumentError or MismatchError is raised on all ranks, and then none of
    the sets is bound.

    Raises:
        TypeError: an entry of the list is not a `ProcessSet`.
        ValueError: two sets have the same ranks, or a set contains all ranks.
        tf.errors.InvalidArgumentError: a set contains a rank that does not exist.
        tfdist.MismatchError: the ranks' lists differ.
    """
    seen = {_everybody()}
    for place, one in enumerate(process_sets):
        if not isinstance(one, ProcessSet) or one.ranks is None:
            raise TypeError(
                "Expected process_sets to be a list of hvd.ProcessSet, or 'dynamic', "
                f"got {one!r} at index {place}."
            )
        if tuple(one.ranks) in seen:
            raise ValueError(
                f"Entry {place} of process_sets is a duplicate: {one}. Use the "
                "existing set (hvd.global_process_set contains all ranks)."
            )
        seen.add(tuple(one.ranks))
    before = tfdist.process_sets()
    try:
        for one in process_sets:
            one._bind(tfdist.add_process_set(one.ranks or ()))
    except Exception as error:
        import tensorflow as tf  # already imported, since it raised the error

        if isinstance(error, tf.errors.InvalidArgumentError | tfdist.MismatchError):
            for one in process_sets:  # on every rank
                if one._made is not None and one._made not in before:
                    remove_process_set(one)
        raise


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set after `hvd.init()`; every rank calls it, with the same ranks.

    Unlike in Horovod, no environment variable has to be set.

    Args:
        process_set: a `ProcessSet` that is not bound yet, or a list of ranks.

    Returns:
        The bound set.

    Raises:
        ValueError: a set of these ranks exists, or `hvd.init()` has not been called.
        tf.errors.InvalidArgumentError: a rank does not exist.
        tf.errors.FailedPreconditionError: the ranks' lists differ; raised on every
            rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> alone = hvd.add_process_set([0])
        >>> alone.included(), hvd.remove_process_set(alone)
        (True, True)
    """
    check_initialized()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = tuple(process_set.ranks or ())
    if ranks in (_everybody(), *(known.ranks for known in tfdist.process_sets())):
        raise ValueError(
            f"A process set of the ranks {list(ranks)} exists already: use that set "
            "(hvd.global_process_set contains all ranks)."
        )
    process_set._bind(tfdist.add_process_set(ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; every rank calls it.

    Args:
        process_set: the result of `add_process_set`.

    Returns:
        Whether the set was removed; False for an unbound set and for the set of all
        ranks.

    Raises:
        tf.errors.FailedPreconditionError: a rank has operations of the set in flight,
            or ranks try to remove different sets; raised on every rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.remove_process_set(hvd.add_process_set([0]))
        True
    """
    made = own(process_set) if process_set.process_set_id else None
    if made is None:
        return False
    tfdist.remove_process_set(made)
    process_set._invalidate()
    _numbers.all()  # frees the ID now, since IDs are reused in the order of removal
    return True


def _everybody() -> tuple[int, ...]:
    """Returns all ranks, or () with a single rank; no new set may equal this tuple."""
    return tuple(range(tfdist.size())) if tfdist.size() > 1 else ()


def ids_and_ranks() -> dict[int, list[int]]:
    """Returns the ranks of each process set by its ID; ID 0 is the set of all ranks."""
    known = {number: list(one.ranks) for one, number in _numbers.all().items()}
    return {0: list(range(tfdist.size())), **known}
