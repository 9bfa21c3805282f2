"""Moves this process of an elastic job from one generation of the world to the next.

A generation ends for all of its ranks when one of them is lost, or when a newcomer is
ready to join. The remaining ranks then ask tfdistrun for their rank and size in the
next generation (`rendezvous.renewal`), reconnect, and share the state of the training.

A generation also ends when a rank leaves the job: because it got SIGTERM, because it is
slow and is replaced (`tfdist.callbacks.Stragglers`), or because the job shrinks. In
this *handover*, the ranks agree through tfdistrun on the step after which the
generation ends, so no rank has to undo a step (`tfdist.launch.membership`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from tfdist.core import native, runtime, term_signal, weights_state, world
from tfdist.core.rendezvous import renewal
from tfdist.core.rendezvous.errors import rank_failed
from tfdist.core.term_signal import TermSignal

_CHANGE_CAUSE = "the number of ranks changes"
_LEAVE_CAUSE = "its program goes back to its last commit"
_HANDOVER_CAUSE = "a rank leaves after a step"
_CAUSES = (_CHANGE_CAUSE, _LEAVE_CAUSE, _HANDOVER_CAUSE)  # no rank was lost
_JOIN_NOTICE = "join notice"
_END_NOTICE = "end notice"
_AGREE_S = 30.0  # for the ranks to agree on the last step of a generation
_AGREE_STEP_S = 0.02
_ABORT_S = 2.0
_RECONNECT_S = 30.0
# Kinds of errors after which this rank continues. Without a majority, the ranks cannot
# decide which of them are lost, and a majority may exclude a rank that was only
# stopped. In an elastic job, tfdistrun decides, and kills the ranks that must not
# continue.
_LOST = ("rank_failed", "shutdown", "no_majority", "evicted")


class Generations:
    """This process's view of the generations of an elastic job.

    Args:
        hides_failures: whether an allreduce that fails because a rank was lost returns
            this rank's own values instead of raising. The step then runs to its end,
            where it is undone.
        progress: function that returns this rank's number of commits, and the number
            after which it takes no more steps. If given, this rank hands over on
            SIGTERM and when the job shrinks; call `ends_after_commit` after each
            commit. If None, SIGTERM has its usual effect, and when the job shrinks, the
            generation ends as it does for newcomers.

    Attributes:
        is_elastic: whether the job is elastic (`tfdistrun --min-np`).
        is_newcomer: whether this process was started after the job began (in place of
            another, as a spare, or because the job grows) and has not joined yet.
        is_last: whether the job is preempted. All ranks then save their state, which is
            the same, and exit with `exit_preempted`.
        has_lost_first: whether the previous generation ended because its rank 0 was
            lost. Its process has ended. (A rank 0 that is lost while the ranks connect
            again does not count.)
    """

    def __init__(
        self,
        *,
        hides_failures: bool = True,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._hides_failures = hides_failures
        self._progress = progress
        self._term = TermSignal(self._ask_to_leave)
        self._is_done = False  # the training has ended
        self.is_last = self.has_lost_first = False
        self.is_elastic = renewal.is_elastic(os.environ)
        # After the process has joined, its environment no longer tells how it started.
        has_place = runtime.generation() > 1
        self.is_newcomer = (
            self.is_elastic and not has_place and renewal.is_newcomer(os.environ)
        )
        self._requests = 0

    def begin(self) -> None:
        """Begins to hide failures, and to watch for newcomers and leaving ranks.

        Failures are hidden only if `hides_failures`. With `progress`, this rank also
        begins to handle SIGTERM. Call this method as soon as the state can be restored.
        """
        if self.is_elastic:
            if self._hides_failures:
                native.take_hidden()
                native.hide_failures(True)
                runtime.state.hides_failures = True
            self._watch_for_newcomers()
            self._watch_for_end()

    def end(self) -> None:
        """Stops hiding failures and handling SIGTERM, at the end of the training.

        After this, no rank hands over: the program may continue, for example with an
        evaluation, which could not be repeated.
        """
        self._is_done = True
        native.hide_failures(False)
        runtime.state.hides_failures = False
        self._term.close()
        if native.failure() is None:  # later steps are not of this training
            weights_state.note_between_steps(False)

    def raise_late_signal(self) -> None:
        """Lets a SIGTERM that came too late for a handover have its usual effect.

        Call it after `end`, when all steps are done.
        """
        if self._term.received:
            signal.raise_signal(signal.SIGTERM)

    def ends_after_commit(self) -> bool:
        """Returns whether this rank has to enter the next generation now.

        Call it after each commit. If newcomers are ready, it ends the generation. If a
        rank wants to leave, this method first waits until the ranks have agreed on the
        last step of the generation.
        """
        notice = _asked_notice()
        if notice is None:
            self.end_for_change()
            return self.has_ended()
        deadline_s = time.monotonic() + _AGREE_S
        while native.failure() is None:
            end = notice.wait_for_end(_AGREE_STEP_S)
            if end is not None:
                return self._committed() >= end or self.has_ended()
            if time.monotonic() >= deadline_s:
                _end_on_all_ranks(_HANDOVER_CAUSE)
        return True

    def check_between_commits(self) -> None:
        """Raises if the generation has ended; ends it if a rank wants to leave.

        Call it in work that takes long and that can be repeated, such as a validation:
        the rank that wants to leave is killed if it does not leave in time.

        Raises:
            tfdist.RankFailedError: the generation has ended.
        """
        if _asked_notice() is not None and native.failure() is None:
            _end_on_all_ranks(_HANDOVER_CAUSE)
        lost = native.failure()
        if self.is_elastic and lost is not None:
            runtime.raise_public(lost)

    def exit_preempted(self) -> NoReturn:
        """Exits the program of a rank that has left, or of a preempted job.

        Raises:
            SystemExit: with code 143, as for a process that SIGTERM terminated.
        """
        self.end()
        raise SystemExit(term_signal.EXIT_CODE)

    def has_ended(self) -> bool:
        """Returns whether the current generation has ended."""
        return self.is_elastic and native.failure() is not None

    def is_step_valid(self) -> bool:
        """Returns whether no failure was hidden since the last call, or since `begin`.

        The step of a newcomer is never valid, because it ran without the other ranks.
        """
        return not self.is_newcomer and native.take_hidden() == 0

    def is_change_due(self) -> bool:
        """Returns whether newcomers are ready to join; on ranks above 0, always False.

        If this rank does not hand over (`progress` is None), returns True also if ranks
        have to leave.
        """
        notice = runtime.state.resources.get(_JOIN_NOTICE)
        return isinstance(notice, renewal.JoinNotice) and notice.received

    def end_for_change(self) -> None:
        """Ends the current generation on all ranks if `is_change_due`."""
        if self.is_change_due():
            _end_on_all_ranks(_CHANGE_CAUSE)

    def leave(self) -> None:
        """Ends the current generation on all ranks, unless it has ended already.

        Call it if this rank returns to its last commit although no rank was lost.
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
            program: hash of everything that must be equal on all ranks.
            share: function that gives all ranks of the new generation the same state,
                with collective operations. All of these ranks call it.

        Raises:
            native.CoreError: the job cannot continue, or excludes this rank.
            SystemExit: this rank has left the job: after SIGTERM, because it is slow
                and was replaced, or because the job shrinks.
        """
        native.hide_failures(False)
        lost = native.failure()
        if lost is not None and not is_loss(lost):
            raise lost
        self.has_lost_first = 0 in _failed_ranks(lost)
        while True:
            place = self._ask(committed, program, lost)
            self.is_newcomer = False  # also if it does not connect
            if place.is_last and self._progress is None:
                raise rank_failed("tfdistrun got SIGTERM, and the job ends")
            try:
                world.reconnect(place, _RECONNECT_S)
                share()
                break
            except Exception as error:
                found = _loss(error)
                if found is None:
                    raise
                lost = found
        self.is_last = place.is_last
        if not self.is_last:
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
        except renewal.DismissedError:
            self.exit_preempted()
        except native.CoreError as error:
            if lost is None:
                raise
            message = f"{lost.message}. {error.message}"
            raise native.CoreError(lost.code, message, lost.payload) from None

    def _watch_for_newcomers(self) -> None:
        if runtime.rank() == 0 and not self.is_newcomer:
            runtime.get_resource(
                _JOIN_NOTICE,
                lambda: renewal.JoinNotice(
                    os.environ,
                    runtime.generation(),
                    for_leavers=self._progress is None,
                ),
            )

    # ---- handover ----

    def _watch_for_end(self) -> None:
        """Begins to handle SIGTERM, and to watch for ranks that want to leave."""
        if self._progress is None or self.is_newcomer:
            return
        runtime.get_resource(
            _END_NOTICE,
            lambda: renewal.EndNotice(
                os.environ,
                runtime.generation(),
                committed=self._commits_unless_finished,
                on_finished=lambda: _end_on_all_ranks(_HANDOVER_CAUSE),
            ),
        )
        self._term.listen()
        if self._term.received:  # in an earlier generation
            self._ask_to_leave()

    def _committed(self) -> int:
        return self._progress()[0] if self._progress is not None else 0

    def _commits_unless_finished(self) -> int | None:
        """Returns the number of commits; None if this rank takes no more steps.

        After `end`, no handover takes place. The final number is then returned, because
        None would end the generation on all ranks.
        """
        committed, total = self._progress() if self._progress is not None else (0, 0)
        return committed if committed < total or self._is_done else None

    def _ask_to_leave(self) -> None:
        renewal.ask_to_leave(os.environ)


def _asked_notice() -> renewal.EndNotice | None:
    """Returns the notice that a rank wants to leave; None if no rank does."""
    notice = runtime.state.resources.get(_END_NOTICE)
    if isinstance(notice, renewal.EndNotice) and notice.was_asked:
        return notice
    return None


def _end_on_all_ranks(cause: str) -> None:
    native.abort(cause)
    deadline = time.monotonic() + _ABORT_S
    while native.failure() is None and time.monotonic() < deadline:
        time.sleep(0.0005)


def can_hand_over() -> bool:
    """Returns whether the running loop can hand over this rank to another process.

    Also True in a newcomer that has not joined the other ranks yet.
    """
    return runtime.is_rehearsing() or _END_NOTICE in runtime.state.resources


def is_loss(error: native.CoreError) -> bool:
    """Returns whether, after an error, this rank has to enter the next generation.

    Example:
        >>> from tfdist.core import native
        >>> from tfdist.core.generations import is_loss
        >>> is_loss(native.CoreError(native.ABORTED, "lost", {"kind": "rank_failed"}))
        True
    """
    return error.payload.get("kind") in _LOST


def _loss(error: Exception) -> native.CoreError | None:
    """Returns the core error if an exception is due to the loss of a rank, or None.

    A rank that did not connect in time counts as lost; tfdistrun knows whether it is.
    """
    found = error if isinstance(error, native.CoreError) else native.failure()
    if found is None:
        return None
    return found if is_loss(found) or found.payload.get("kind") == "timeout" else None


def _failed_ranks(lost: native.CoreError | None) -> list[int]:
    """Returns the ranks that an error names as lost."""
    if lost is None or lost.payload.get("kind") not in ("rank_failed", "no_majority"):
        return []
    rank = int(lost.payload.get("rank", -1))
    own = runtime.rank() if runtime.is_initialized() else None
    was_ended = any(cause in lost.message for cause in _CAUSES)
    if rank < 0 or rank == own or was_ended:
        return []
    return [rank]
