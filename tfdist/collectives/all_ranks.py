"""Runs a function on one or all ranks; if it raises on any rank, every rank raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
    max_bytes: int = MAX_BYTES,
    timeout_s: float | None,
    process_set: ProcessSet | None,
) -> Any:
    """Runs a function on one rank, while the other ranks wait for its result.

    Args:
        rank: rank that runs the function.
        work: the function; returns plain data, which all ranks get.
        failed: beginning of the message on the other ranks if `work` raises.
        place: name of `work`, for the error if a collective is called in `work`.
        name: operation name; calls with the same name on different ranks are matched.
        max_bytes: largest size of the encoded result, in bytes; default 16 MiB.
        timeout_s: seconds to wait for the slowest rank.
        process_set: ranks that take part; only they make the call.

    Returns:
        The result of `work`, on all ranks; None in a newcomer (a process that has not
        joined its elastic job yet).

    Raises:
        Exception: on `rank`, the exception raised by `work`.
        tfdist.RankFailedError: on the other ranks, if `work` raised; or a rank failed.
    """
    if runtime.is_rehearsing():
        return None
    failure: Exception | None = None
    own: dict[str, Any] = {}
    works = runtime.rank() == rank  # also read by tfdist.core.deadlock
    if works:
        try:
            with single_rank_code(place, process_set, others_wait=True):
                own = {"failure": "", "result": work()}
        except Exception as error:  # noqa: BLE001 - reported to all ranks, then raised
            failure = error
            own = {"failure": _describe_error(error), "result": None}
        works = False
    try:
        shared = broadcast_object(
            own,
            rank,
            name=name,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            process_set=process_set,
        )
    except Exception:
        if failure is None:
            raise
        # Otherwise another rank has received the failure and has already exited.
    if failure is not None:
        raise failure  # outside the handler: not chained to the error of the broadcast
    if shared["failure"]:
        raise errors.RankFailedError(
            f"{failed}: {shared['failure']}",
            errors.ErrorRecord(kind="rank_failed", rank=rank, cause=shared["failure"]),
        )
    return shared["result"]


@contextlib.contextmanager
def single_rank_code(
    place: str, process_set: ProcessSet | None, *, others_wait: bool
) -> Iterator[None]:
    """Marks code that only this rank runs: a collective called in it raises an error.

    Args:
        place: name of the code, for messages.
        process_set: this rank and the ranks that do not run the code; None: all ranks.
        others_wait: whether the other ranks wait until the code has ended.
    """
    with later_single_rank_code(place, process_set, others_wait=others_wait)():
        yield


def later_single_rank_code(
    place: str, process_set: ProcessSet | None, *, others_wait: bool
) -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that does the same as `single_rank_code`, for another thread.

    The ranks are those of the time of this call: while the ranks of an elastic job
    connect again, they are unknown.
    """
    ranks, rank = members_of(process_set), runtime.rank()

    @contextlib.contextmanager
    def marked() -> Iterator[None]:
        with (
            errors.translate(),
            on_this_rank_alone(
                place,
                ranks,
                rank=rank,
                others_wait=others_wait,
                ranks_of_set=runtime.ranks_of_set,
            ),
        ):
            yield

    return marked


class CoordinatedCall:
    """A function that all ranks call at the same time, as a sequence of stages.

    Within a stage, the ranks work independently. At the end of a stage, they wait for
    each other and share their outcomes.

    Args:
        function: name of the function that the user called, for messages.
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
        """Runs a stage: calls `work`, then gathers the outcomes of all ranks.

        Args:
            stage: name of the stage, the same on all ranks.
            work: returns a result, and plain data that the other ranks get.

        Returns:
            The result, and the data of all ranks in rank order.

        Raises:
            Exception: on the rank where `work` raised, the exception of `work`.
            tfdist.RankFailedError: `work` raised on another rank.
            tfdist.MismatchError: another rank calls a different function, or has
                joined.
        """
        failure: Exception | None = None
        data: dict[str, Any] = {}
        try:
            result, data = work()
        except Exception as error:  # reported to all ranks, then raised below
            failure = error
        own = {
            "stage": f"tfdist.{self.function}, {stage}",
            "failure": "" if failure is None else _describe_error(failure),
            "data": data,
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
        facts = [{"stage": o["stage"], **o["data"]} for o in shared]
        self.agree(facts, "stage", "the stage", "Call the same function on all ranks.")
        return result, facts

    def agree(
        self, facts: list[dict[str, Any]], key: str, what: str, advice: str
    ) -> None:
        """Raises on all ranks if the value of `key` differs between the ranks.

        Raises:
            tfdist.MismatchError: the message shows two different values.
        """
        for rank, other in zip(self.ranks, facts, strict=True):
            if other[key] != facts[0][key]:
                raise errors.MismatchError(
                    f"The ranks call tfdist.{self.function} differently: {what} is "
                    f"{facts[0][key]!r} on rank {self.ranks[0]} and {other[key]!r} on "
                    f"rank {rank}. {advice}"
                )


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:4096]
