"""Something that all ranks do together, or one for all: its error is one of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tfdist import errors
from tfdist.collectives.objects import broadcast_object, gather_from_all
from tfdist.core import runtime
from tfdist.core.deadlock.one_rank_code import on_this_rank_alone
from tfdist.core.process_sets import ProcessSet, members_of

T = TypeVar("T")
MAX_BYTES = 16 << 20


def run_on_rank(
    rank: int,
    work: Callable[[], Any],
    failed: str,
    *,
    place: str,
    name: str,
    timeout_s: float | None,
    process_set: ProcessSet | None,
) -> Any:
    """One rank works, and the others wait for it.

    Args:
        rank: the one that works.
        work: gives plain data for all ranks.
        failed: what it means when it raises, for the message on the other ranks.
        place: what `work` is, for the message of a collective that is called in it.
        name: identifies the call across ranks.
        timeout_s: seconds to wait.
        process_set: the ranks that take part, which alone call it.

    Returns:
        What `work` gave, on all ranks.

    Raises:
        Exception: what `work` raised, on `rank`.
        tfdist.RankFailedError: it raised, on the others; or a rank failed.
    """
    failure: Exception | None = None
    own: dict[str, Any] = {}
    works = runtime.rank() == rank  # also read by tfdist.core.deadlock
    if works:
        try:
            with alone(place, process_set, others_wait=True):
                own = {"failure": "", "told": work()}
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            failure = error
            own = {"failure": _describe_error(error), "told": None}
        works = False
    try:
        shared = broadcast_object(
            own, rank, name=name, timeout_s=timeout_s, process_set=process_set
        )
    except Exception:
        if failure is None:
            raise  # else: a rank that was told has ended already
    if failure is not None:
        raise failure  # outside of the handler: it is not the other ranks' fault
    if shared["failure"]:
        raise errors.RankFailedError(
            f"{failed}: {shared['failure']}",
            errors.ErrorRecord(kind="rank_failed", rank=rank, cause=shared["failure"]),
        )
    return shared["told"]


@contextlib.contextmanager
def alone(
    place: str, process_set: ProcessSet | None, *, others_wait: bool
) -> Iterator[None]:
    """Marks code that only this rank runs: a collective in it is an error at once.

    Args:
        place: the name of the code, for messages.
        process_set: this rank and those that do not run it; None for all.
        others_wait: whether these wait until it has ended.
    """
    ranks = members_of(process_set)
    with (
        errors.translate(),
        on_this_rank_alone(
            place,
            ranks,
            rank=runtime.rank(),
            others_wait=others_wait,
            ranks_of_set=runtime.ranks_of_set,
        ),
    ):
        yield


class CoordinatedCall:
    """The stages of one function that all ranks call at the same time.

    Between two exchanges a rank works alone, as long as it takes: nobody waits in the
    middle of the work, so the ranks may have different amounts of it.

    Args:
        function: what the user called, for messages.
        timeout_s: seconds to wait for the slowest rank at the end of each stage.
        process_set: the ranks that take part.
    """

    def __init__(
        self, function: str, timeout_s: float | None, process_set: ProcessSet | None
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.process_set = process_set
        self.ranks = list(members_of(process_set))
        if runtime.rank() not in self.ranks:
            raise ValueError(
                f"Expected tfdist.{function} to be called on the ranks {self.ranks} of "
                f"its process set, got a call on rank {runtime.rank()}."
            )

    def run(
        self, stage: str, work: Callable[[], tuple[T, dict[str, Any]]]
    ) -> tuple[T, list[dict[str, Any]]]:
        """Does the work, then tells all ranks how it went.

        Args:
            stage: its name, the same on all ranks.
            work: gives a result, and plain data for the other ranks.

        Returns:
            The result, and the data of all ranks in their order.

        Raises:
            Exception: what `work` raised, on the rank where it did.
            tfdist.RankFailedError: it raised on another rank.
            tfdist.MismatchError: another rank is in another function, or has joined.
        """
        failure: Exception | None = None
        told: dict[str, Any] = {}
        try:
            result, told = work()
        except Exception as error:  # told to all ranks, raised below
            failure = error
        own = {
            "stage": f"tfdist.{self.function}, {stage}",
            "failure": "" if failure is None else _describe_error(failure),
            "told": told,
        }
        try:
            shared = gather_from_all(
                own,
                f"tfdist.{self.function}",
                name="tfdist.evaluate, predict or restore",
                max_bytes=MAX_BYTES,
                timeout_s=self.timeout_s,
                process_set=self.process_set,
            )
        except Exception:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        for rank, other in zip(self.ranks, shared, strict=True):
            if other["failure"]:
                raise errors.RankFailedError(
                    f"rank {rank} failed in {other['stage']}: {other['failure']}",
                    errors.ErrorRecord(
                        kind="rank_failed", rank=rank, cause=other["failure"]
                    ),
                )
        facts = [{"stage": o["stage"], **o["told"]} for o in shared]
        self.agree(facts, "stage", "where they are", "Call the same on all ranks.")
        return result, facts

    def agree(
        self, facts: list[dict[str, Any]], key: str, what: str, advice: str
    ) -> None:
        """Raises on all ranks if a fact is not the same everywhere.

        Raises:
            tfdist.MismatchError: with both values.
        """
        for rank, other in zip(self.ranks, facts, strict=True):
            if other[key] != facts[0][key]:
                raise errors.MismatchError(
                    f"The ranks differ in tfdist.{self.function}: {what} is "
                    f"{facts[0][key]!r} on rank {self.ranks[0]} and {other[key]!r} on "
                    f"rank {rank}. {advice}"
                )


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:4096]
