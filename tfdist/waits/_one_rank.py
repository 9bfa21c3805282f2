"""Refuses collectives in code that one rank runs alone.

The other ranks would not call them, so the one would wait for them until the deadline,
and they, where they wait for its result, for the one.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tfdist import _runtime


@dataclass(frozen=True)
class Place:
    """Code that one rank runs alone.

    Attributes:
        name: for messages, e.g. "RankZeroOnly(CSVLogger).on_epoch_end".
        others: the ranks that do not run it.
        others_wait: whether they wait until it has ended.
    """

    name: str
    others: frozenset[int]
    others_wait: bool


PLACE: contextvars.ContextVar[Place | None] = contextvars.ContextVar(
    "tfdist_one_rank", default=None
)


@contextlib.contextmanager
def on_this_rank_alone(
    name: str, ranks: Collection[int], *, others_wait: bool
) -> Iterator[None]:
    """Refuses the collectives that are called inside, in this thread.

    A function that was traced before is not looked into: `_watch` finds it when it
    waits.

    Args:
        name: of the place, as the user knows it.
        ranks: this one and those that do not run what is inside.
        others_wait: whether they wait until it has ended. If not, they may call what
            belongs to a send or a receive, which are then allowed.
    """
    others = frozenset(ranks) - {_runtime.rank()}
    token = PLACE.set(Place(name, others, others_wait))
    try:
        yield
    finally:
        PLACE.reset(token)


def refuse_collective(place: Place, operation: str, arguments: dict[str, Any]) -> None:
    """Raises if an operation needs a rank that does not run this place.

    Args:
        place: where it is called.
        operation: "tfdist_allreduce", ...
        arguments: those of the operation.

    Raises:
        tfdist.MismatchError: names the call and the place.
    """
    if operation in ("tfdist_send", "tfdist_recv"):
        if not place.others_wait:
            return
        needed = {int(arguments.get("dst", arguments.get("src", -1)))}
    else:
        needed = _members(arguments.get("process_set", 0))
    if needed & place.others:
        _refuse(place, operation.replace("tfdist_", "tfdist.", 1))


def check_not_alone(function: str, process_set: int = 0) -> None:
    """The same for what is no operation, by the name of its function."""
    place = PLACE.get()
    if place is not None and _members(process_set) & place.others:
        _refuse(place, function)


def _members(process_set: int) -> set[int]:
    for known in _runtime.live_sets():
        if known.id == process_set:
            return set(known.ranks)
    return set(range(_runtime.size()))


def _refuse(place: Place, operation: str) -> None:
    from tfdist import errors  # needs TensorFlow
    from tfdist.waits._calls import describe_call  # needs Keras

    called = describe_call(sys._getframe(1)) or operation
    own = _runtime.rank()
    ranks = ", ".join(map(str, sorted(place.others)))
    rank = f"rank{'s' if len(place.others) > 1 else ''} {ranks}"
    raise errors.MismatchError(
        f"{called} was called inside {place.name}, which only rank {own} runs. It is a "
        f"collective operation: it needs every rank, and {rank} would not call it. "
        "Call it where all ranks come: before or after this, or in a callback of your "
        "own that every rank has without RankZeroOnly."
    )
