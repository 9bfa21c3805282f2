"""Moves this process of an elastic job from one generation of the world to the next.

A generation ends for all of its ranks when one of them is lost, or when a newcomer is
ready to join. The ranks that are left then ask tfdistrun for their places
(`rendezvous.renewal`), connect again, and share the state of the training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from tfdist.core import native, runtime, world
from tfdist.core.rendezvous import renewal

_JOIN_CAUSE = "new ranks are ready to join"
_LEAVE_CAUSE = "its program goes back to its last commit"
_JOIN_NOTICE = "join notice"
_ABORT_S = 2.0
_RECONNECT_S = 30.0
# Kinds of errors after which this rank goes on. The ranks cannot decide without a
# majority which of them are lost, and may exclude a rank that was only stopped. In an
# elastic job, tfdistrun decides: it kills the ranks that must not go on.
_LOST = ("rank_failed", "shutdown", "no_majority", "evicted")


class Generations:
    """The generations of an elastic job, as one of its processes sees them.

    Args:
        hides_failures: whether an allreduce that fails because a rank was lost returns
            the rank's own values, so that the step runs to its end, where it is undone.
            Otherwise it raises.

    Attributes:
        is_elastic: whether the job is elastic (`tfdistrun --min-np`).
        is_newcomer: whether this process was started in place of a lost rank, and has
            not joined the other ranks yet.
    """

    def __init__(self, *, hides_failures: bool = True) -> None:
        self._hides_failures = hides_failures
        self.is_elastic = renewal.is_elastic(os.environ)
        # The variables of a process that has a place say nothing about its start.
        has_place = runtime.generation() > 1
        self.is_newcomer = (
            self.is_elastic and not has_place and renewal.is_newcomer(os.environ)
        )
        self._requests = 0

    def begin(self) -> None:
        """Begins to hide failures, if they are hidden, and to watch for newcomers.

        Call it when the state can be restored.
        """
        if self.is_elastic:
            if self._hides_failures:
                native.take_hidden()
                native.hide_failures(True)
            self._watch_for_newcomers()

    def end(self) -> None:
        """Stops hiding failures."""
        native.hide_failures(False)

    def has_ended(self) -> bool:
        """Returns whether the current generation has ended."""
        return self.is_elastic and native.failure() is not None

    def is_step_valid(self) -> bool:
        """Returns whether no failure was hidden since the last call, or since `begin`.

        The step of a newcomer is never valid, because it ran without the other ranks.
        """
        return not self.is_newcomer and native.take_hidden() == 0

    def has_ready_newcomers(self) -> bool:
        """Returns whether newcomers are ready to join; only rank 0 knows."""
        notice = runtime.state.resources.get(_JOIN_NOTICE)
        return isinstance(notice, renewal.JoinNotice) and notice.received

    def end_for_newcomers(self) -> None:
        """Ends the current generation on all ranks if newcomers are ready to join."""
        if self.has_ready_newcomers():
            _end_on_all_ranks(_JOIN_CAUSE)

    def leave(self) -> None:
        """Ends the current generation on all ranks, unless it has ended already.

        Call it if this rank goes back to its last commit although no rank was lost.
        """
        if native.failure() is None:
            _end_on_all_ranks(_LEAVE_CAUSE)

    def enter_next(
        self, committed: int, program: str, share: Callable[[], None]
    ) -> None:
        """Connects with the ranks of the next generation, and shares the state.

        Starts again if another rank is lost meanwhile.

        Args:
            committed: number of steps that this rank has committed; -1 for a newcomer.
            program: hash of what must be equal on all ranks.
            share: function that all ranks of the new generation call, and that uses
                collective operations to give them the same state.

        Raises:
            native.CoreError: the job cannot go on, or this rank was excluded from it.
        """
        native.hide_failures(False)
        lost = native.failure()
        if lost is not None and not is_loss(lost):
            raise lost
        while True:
            place = self._ask(committed, program, lost)
            self.is_newcomer = False  # also if it does not connect
            try:
                world.reconnect(place, _RECONNECT_S)
                share()
                break
            except Exception as error:
                found = _loss(error)
                if found is None:
                    raise
                lost = found
        self.begin()

    def _ask(
        self, committed: int, program: str, lost: native.CoreError | None
    ) -> renewal.Place:
        self._requests += 1
        request = {
            "generation": 0 if self.is_newcomer else runtime.generation(),
            "committed": committed,
            "failed": _failed_ranks(lost),
            "program": program,
        }
        try:
            return renewal.ask_for_place(os.environ, self._requests, request)
        except native.CoreError as error:
            if lost is None:
                raise
            message = f"{lost.message}. {error.message}"
            raise native.CoreError(lost.code, message, lost.payload) from None

    def _watch_for_newcomers(self) -> None:
        if runtime.rank() == 0 and not self.is_newcomer:
            runtime.get_resource(
                _JOIN_NOTICE,
                lambda: renewal.JoinNotice(os.environ, runtime.generation()),
            )


def _end_on_all_ranks(cause: str) -> None:
    native.abort(cause)
    deadline = time.monotonic() + _ABORT_S
    while native.failure() is None and time.monotonic() < deadline:
        time.sleep(0.0005)


def is_loss(error: native.CoreError) -> bool:
    """Returns whether an error means that the next generation has to be entered.

    Example:
        >>> from tfdist.core import native
        >>> from tfdist.core.generations import is_loss
        >>> is_loss(native.CoreError(native.ABORTED, "lost", {"kind": "rank_failed"}))
        True
    """
    return error.payload.get("kind") in _LOST


def _loss(error: Exception) -> native.CoreError | None:
    """Returns the loss of a rank that an exception stands for; None for other errors.

    A rank that did not connect in time counts as lost: tfdistrun knows whether it is.
    """
    found = error if isinstance(error, native.CoreError) else native.failure()
    if found is None:
        return None
    return found if is_loss(found) or found.payload.get("kind") == "timeout" else None


def _failed_ranks(lost: native.CoreError | None) -> list[int]:
    """Returns the ranks that an error names as lost."""
    if lost is None or lost.payload.get("kind") != "rank_failed":
        return []
    rank = int(lost.payload.get("rank", -1))
    own = runtime.rank() if runtime.is_initialized() else None
    was_ended = _JOIN_CAUSE in lost.message or _LEAVE_CAUSE in lost.message
    if rank < 0 or rank == own or was_ended:
        return []
    return [rank]
