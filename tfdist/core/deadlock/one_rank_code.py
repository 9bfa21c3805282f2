"""Rejects collectives in code that only one rank runs.

The other ranks would not call them, so this rank would wait for the other ranks until
the deadline, and the other ranks might wait for this rank.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Code that only one rank runs.

    Attributes:
        name: name of the code for messages, e.g.
            "RankZeroOnly(CSVLogger).on_epoch_end".
        rank: rank that runs the code.
        others: ranks that do not run the code.
        others_wait: whether the other ranks wait until the code has ended.
        ranks_of_set: returns the ranks of a process set, given its number.
    """

    name: str
    rank: int
    others: frozenset[int]
    others_wait: bool
    ranks_of_set: Callable[[int], frozenset[int]]


PLACE: contextvars.ContextVar[Place | None] = contextvars.ContextVar(
    "tfdist_one_rank", default=None
)


@contextlib.contextmanager
def on_this_rank_alone(
    name: str,
    ranks: Collection[int],
    *,
    rank: int,
    others_wait: bool,
    ranks_of_set: Callable[[int], frozenset[int]],
) -> Iterator[None]:
    """Rejects collectives that this thread calls inside the `with` block.

    Collectives of a function that was traced before are not rejected: `watcher` detects
    them when they wait.

    Args:
        name: name of the code, for messages.
        ranks: this rank and the ranks that do not run the code.
        rank: this rank.
        others_wait: whether the other ranks wait until the code has ended. If they do
            not, they may call the matching receive or send, so both are allowed.
        ranks_of_set: returns the ranks of a process set, given its number.
    """
    others = frozenset(ranks) - {rank}
    token = PLACE.set(Place(name, rank, others, others_wait, ranks_of_set))
    try:
        yield
    finally:
        PLACE.reset(token)


def refuse_collective(place: Place, operation: str, arguments: dict[str, Any]) -> None:
    """Raises if an operation needs a rank that does not run this code.

    Args:
        place: code that calls the operation.
        operation: name of the operation, such as "tfdist_allreduce".
        arguments: arguments of the operation.

    Raises:
        tfdist.MismatchError: the message names the call and the code.
    """
    if operation in ("tfdist_send", "tfdist_recv"):
        if not place.others_wait:
            return
        needed = frozenset([int(arguments.get("dst", arguments.get("src", -1)))])
    else:
        needed = place.ranks_of_set(arguments.get("process_set", 0))
    if needed & place.others:
        _refuse(place, operation.replace("tfdist_", "tfdist.", 1))


def check_not_alone(function: str, process_set: int = 0) -> None:
    """Raises as `refuse_collective` does, for a function that is not an operation."""
    place = PLACE.get()
    if place is not None and place.ranks_of_set(process_set) & place.others:
        _refuse(place, function)


def _refuse(place: Place, operation: str) -> None:
    from tfdist.core import exceptions  # needs TensorFlow
    from tfdist.core.deadlock.call_stack import describe_call  # only for the message

    called = describe_call(sys._getframe(1)) or operation
    ranks = ", ".join(map(str, sorted(place.others)))
    rank = f"rank{'s' if len(place.others) > 1 else ''} {ranks}"
    raise exceptions.MismatchError(
        f"{called} was called inside {place.name}, which only rank {place.rank} runs. "
        f"Every rank must call this collective operation, and {rank} would not call "
        "it. Call it before or after this code, where every rank runs it, or in a "
        "callback that is not wrapped in RankZeroOnly."
    )
