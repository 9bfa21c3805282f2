"""Decides what an elastic job does next, from the state of its members."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.launch import membership_reasons as reasons
from tfdist.launch.membership_actions import (
    Action,
    Announce,
    Answer,
    Dismiss,
    Kill,
    Prioritize,
    Refuse,
    Request,
    Start,
    Stop,
)
from tfdist.launch.membership_state import (
    BACKGROUND_LIMIT_S,
    MOST_ROUNDS,
    NAMED_LIMIT_S,
    MembershipState,
    assign_ranks,
)


class Decisions(MembershipState):
    """The decisions of a `Membership` after each event."""

    def _accept(self, request: Request, now_s: float) -> None:
        """Stores a request; sets deadlines for members that it reports as failed."""
        member = request.member
        self._requests[member] = request
        self._deadlines_s.pop(member, None)
        if member in self._unready:
            self._unready.remove(member)
            self.start_failures = 0
        if member not in self._ranks:
            return
        self.program = request.program or self.program
        self.committed = max(self.committed, request.committed)
        for other in self._members():
            if self._ranks[other] in request.failed and other not in self._requests:
                self._deadlines_s.setdefault(other, now_s + NAMED_LIMIT_S)

    def _kill(self, member: int, reason: str) -> list[Action]:
        if member in self._killed:
            return []
        self._killed.add(member)
        return [Kill(member, reason)]

    def _refuse(self, member: int, reason: str, now_s: float) -> list[Action]:
        if member not in self._refused:
            self._deadlines_s[member] = now_s + self._start_limit_s
        self._refused[member] = reason
        self._requests.pop(member, None)
        return [Refuse(member, reason)]

    def _settle(self, now_s: float) -> list[Action]:
        """Updates the state after an event; returns the actions that follow."""
        if self._is_over():
            return []
        if not self._members():
            return self._end(now_s)
        actions = self._close(now_s) if self._is_complete() else []
        if self._is_over():
            return actions
        self._let_slow_member_leave(now_s)
        self._keep_needed_members()
        actions += self._kill_surplus()
        if self._is_open():
            self._opened_s = now_s if self._opened_s is None else self._opened_s
        else:
            self._opened_s = None
            actions += self._end_generation()
        self._losses = min(self._losses, self._missing())
        actions += self._prioritize(now_s)
        while self._needs_process() and self._may_start():
            if self._free_starts() == 0:
                self._losses -= 1
                self.restarts += 1
            actions.append(self._start(now_s))
        return actions

    def _prioritize(self, now_s: float) -> list[Action]:
        """Takes newcomers out of the background once needed, or after a minute."""
        needed = {*self._needed_newcomers(), *self._ranks}
        found = [
            member
            for member, end_s in self._background.items()
            if member in needed or now_s >= end_s
        ]
        for member in found:
            del self._background[member]
        return [Prioritize(member) for member in found if member in self._live]

    def _kill_surplus(self) -> list[Action]:
        """Kills newcomers that are no longer needed, or are on removed slots."""
        actions: list[Action] = []
        for member in self._surplus_newcomers():
            self._surplus.add(member)
            reason = reasons.surplus(self._target())
            if member in self._unwanted:
                reason = reasons.SLOT_REMOVED
            actions += self._kill(member, reason)
        return actions

    def _let_slow_member_leave(self, now_s: float) -> None:
        """Lets a slow member leave as soon as a newcomer can take its place."""
        if self._slow is None or self._is_going(self._slow):
            return
        if self._slow not in self._members() or not self._may_replace():
            self._slow = None
        elif self._ready():
            self._handovers.leave_as_slow(self._slow, now_s, self._round_limit_s)
            self._slow = None

    def _keep_needed_members(self) -> None:
        """Lets slow members stay if the job would end without them."""
        if self._handovers.slow and self._must_end():
            self._handovers.keep_slow()

    def _end_generation(self) -> list[Action]:
        """Ends the running generation if members leave, or newcomers are ready.

        Members that were asked for their number of commits wait to be told the last
        step. They are told even if no member leaves any more.
        """
        if self.preempted:
            return []
        was_asked = self._handovers.has_asked(self._generation)
        if self._is_preempting or self._leaving() or was_asked:
            return self._handovers.end_generation(self._generation, self._members())
        has_room = self._openings(self._members()) > 0
        if self._ready() and has_room and self._announced < self._generation:
            self._announced = self._generation
            return [Announce(self._generation)]
        return []

    def _start(self, now_s: float, *, with_ranks: bool = False) -> Start:
        """Registers the next newcomer; returns the action that starts it.

        Args:
            now_s: the current time, in seconds.
            with_ranks: whether it starts together with the first ranks. As these do not
                train yet, it does not start in the background.
        """
        member = self._next_member
        self._live.add(member)
        self._unready.add(member)
        self._deadlines_s[member] = now_s + self._start_limit_s
        self._next_member += 1
        if with_ranks or member in self._needed_newcomers():
            return Start(member)
        self._background[member] = now_s + BACKGROUND_LIMIT_S
        return Start(member, in_background=True)

    def _end(self, now_s: float) -> list[Action]:
        """Ends the job after the last member of the newest generation has exited."""
        if self.preempted:
            self._is_saved = True
            return []
        failed = self._failed & self._ranks.keys()
        if failed:
            ranks = sorted(self._ranks[member] for member in failed)
            have_others_finished = len(failed) < len(self._ranks.keys() - self.left)
            explain = (
                reasons.failed_at_end if have_others_finished else reasons.all_failed
            )
            return self._stop(explain(self._generation, ranks), now_s)
        self.finished = True
        actions: list[Action] = []
        for member in sorted(self._live - self.left):
            actions += self._kill(member, "the job has finished")
        return actions

    def _close(self, now_s: float) -> list[Action]:
        """Closes the round: forms a generation, waits for newcomers, or stops."""
        actions: list[Action] = []
        for newcomer in self._ready():
            if reason := self._other_program(self._requests[newcomer]):
                actions += self._refuse(newcomer, reason, now_s)
        # A member may have been lost, or the newcomer for a slow member refused.
        self._keep_needed_members()
        committed = max(self._requests[one].committed for one in self._members())
        if committed < 0:
            reason = reasons.state_lost(self._generation)
            return [*actions, *self._stop(reason, now_s)]
        if self._must_end():
            return [*actions, *self._form_last(now_s)]
        actions += self._dismiss(committed, now_s)
        members = self._members()
        newcomers = self._ready()[: max(0, self._openings(members))]
        is_after_loss = len(members) < len(self._ranks.keys() - self.left)
        rounds = self._rounds_without_step
        if is_after_loss:
            rounds = rounds + 1 if committed <= self._committed_at_failure else 0
        if rounds == MOST_ROUNDS:
            reason = reasons.no_progress(committed)
            return [*actions, *self._stop(reason, now_s)]
        left = len(members) + len(newcomers)
        if left < self._min_size:
            if self._largest_size() < self._min_size:
                reason = self._reason_for_too_few(left)
                actions += self._stop(reason, now_s)
            return actions
        if is_after_loss:
            self._rounds_without_step = rounds
            self._committed_at_failure = max(self._committed_at_failure, committed)
        return [*actions, *self._form(members, newcomers)]

    def _dismiss(self, committed: int, now_s: float) -> list[Action]:
        """Dismisses the members that leave, unless only they have the newest state.

        If only they have it, they take part in one more generation, in which the other
        members receive their state.
        """
        leaving = self._leaving()
        staying = [m for m in self._members() if m not in leaving]
        if max(self._requests[member].committed for member in staying) < committed:
            return []
        if not self._max_restarts:  # members that leave on request are not replaced
            self._losses += len(self._asked_to_leave())
        for member in leaving:
            del self._requests[member]
            self._handovers.dismiss(member, now_s)
        return [Dismiss(member) for member in leaving]

    def _form_last(self, now_s: float) -> list[Action]:
        """Forms the last generation, in which the members save; kills newcomers."""
        self.preempted = True
        members = self._members()
        actions: list[Action] = []
        for member in sorted(self._live.difference(members, self.left)):
            actions += self._kill(member, "the job is preempted")
        for member in members:
            self._handovers.leave(member, now_s)
        return [*actions, *self._form(members, [])]

    def _form(self, members: Sequence[int], newcomers: Sequence[int]) -> list[Action]:
        """Forms the next generation; other ready newcomers (spares) keep waiting."""
        old = {member: self._ranks[member] for member in members}
        self._ranks = assign_ranks(old, newcomers)
        self._generation += 1
        for member in self._ranks:
            del self._requests[member]
        return [
            Answer(member, self._generation, rank, len(self._ranks), self.preempted)
            for member, rank in self._ranks.items()
        ]

    def _stop(self, reason: str, now_s: float) -> list[Action]:
        """Stops the job; refuses the requests that wait for an answer."""
        self.stop_reason = reason
        actions: list[Action] = [Stop(reason)]
        for member in [*self._members(), *self._ready()]:
            actions += self._refuse(member, reason, now_s)
        return actions
