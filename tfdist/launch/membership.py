"""Decides which processes belong to an elastic job, and assigns their ranks.

The processes of a job are its *members*. They are numbered in the order in which they
are started, and a number is never used again. A *generation* is a set of members that
are connected with each other, with ranks 0 to n - 1. When a generation ends for a
member, because a rank has failed or because other processes wait to join, the member
sends a *request* for its place in the next generation. The first request opens a
*round*. The round closes when every member of the generation has either sent its
request or exited. Therefore no member can still run steps of a generation when the next
one is formed.

A *newcomer* is a process that was started later: to replace a member, because the job
grows, or as a spare. It has no place in a generation yet. It prepares itself (imports
and traces), and sends a request when it is ready.

A member that gets SIGTERM wants to *leave*. The generation then ends after a step that
all its members have committed (see `membership_handover`), and the member is dismissed
when the round closes. If the whole job gets SIGTERM, or too few members would be left,
the members form a last generation, in which they save and exit: the job is *preempted*.

The slots of the job can change (`Membership.resize`). If the job grows, newcomers are
started. If it shrinks, the members with the highest ranks leave in the same way as
after SIGTERM, and newcomers that are no longer needed are killed. Members on removed
slots are *unwanted*: they leave before other members, even if the size of the job does
not change, but only while enough members are left or ready. Their replacements are
started at once, on other slots.

A member that is *slow* is replaced on request (`Membership.replace`). It leaves when a
newcomer is ready to take its place. If that newcomer was started because the job grows,
one more newcomer is started. If the job shrinks before a newcomer is ready, the slow
member is the first to leave, and is not replaced.

A host may be lost (`Membership.set_room`). The number of slots on the remaining hosts
then limits the number of members, but members that are already running may stay.

This module only decides. It has no clock, threads, sockets or processes: times are
arguments, and decisions are returned as actions, which tfdistrun carries out.
"""

from __future__ import annotations

from collections.abc import Collection

from tfdist.launch.membership_actions import Action, Fail, Request
from tfdist.launch.membership_decisions import Decisions


class Membership(Decisions):
    """The members, ranks and generations of an elastic job.

    The members 0 to size - 1, which the caller has started, form generation 1, with
    their numbers as ranks. Each event is a method that returns actions, in the order in
    which they must be carried out. Times are in seconds, on any monotonic clock.

    A killed process belongs to its generation until `ended` is called for it: only then
    is it certain that the process runs no more steps.

    Args:
        size: number of members at the start, and the largest size of a generation until
            `resize` changes it. A member that exits with code 0 has finished, and is
            not replaced: the largest size falls by one, unless the job is shrinking.
        min_size: smallest size of a generation. If fewer members are left, the job
            waits for replacements. If replacements cannot make them enough, the job
            stops.
        max_restarts: largest number of replacements that are started for lost members
            and newcomers.
        max_size: largest size that `resize` may set. Default: `size`.
        spares: number of processes that are kept ready to take the place of a lost
            member at once; `begin` starts them. A process that is started in place of a
            used spare counts as a replacement.
        round_limit_s: seconds after the first request of a round at which members that
            have not sent a request are killed.
        start_limit_s: time limit in seconds for a newcomer to become ready after its
            start, and for a refused process to exit. A process that exceeds it is
            killed.
        leave_limit_s: time limit in seconds for a member to exit after it got SIGTERM,
            or after the last generation of a preempted job was formed. A member that
            exceeds it is killed. For a slow member, the limit is `round_limit_s`.
        replace_every_s: minimum seconds between two replacements of slow members.

    Attributes:
        restarts: number of processes that were started in place of lost processes.
            Processes that replace a member that left or is slow, or that were started
            because the job grows, do not count.
        committed: largest number of committed steps in any request; -1 before the first
            request.
        program: `Request.program` of the members, from their latest request; "" if it
            is not known.
        finished: whether all members of the newest generation have exited with code 0.
        start_failures: number of consecutive newcomers that exited before they were
            ready. Once it reaches START_FAILURES, no more newcomers are started.
        stop_reason: reason in the `Stop` that was returned; "" if none was returned.
        preempted: whether the last generation, in which the members save, was formed.

    Raises:
        ValueError: min_size is not in 1 to size, max_size is less than size, or
            max_restarts or spares is negative.

    Example:
        >>> from tfdist.launch.membership import Membership, Request
        >>> job = Membership(2, min_size=1, max_restarts=1)
        >>> job.ended(1, failed=True, now_s=7.0)
        [Fail(generation=1, member=1, rank=1), Start(member=2, in_background=False)]
        >>> job.request(Request(member=0, generation=1, committed=5), now_s=7.5)
        [Answer(member=0, generation=2, rank=0, size=1, is_last=False)]
    """

    def begin(self, now_s: float) -> list[Action]:
        """Starts the spares; call this after the members have been started."""
        return [self._start(now_s, with_ranks=True) for _ in range(self._spares)]

    def request(self, request: Request, now_s: float) -> list[Action]:
        """Handles the request of a member, or of a newcomer that is ready.

        A second request for the same generation replaces the first. A request is
        ignored if its sender is unknown or has exited, since nobody waits for an
        answer; if its sender was killed or dismissed, since that process will exit in
        any case; or if it is for an earlier generation, since requests for that
        generation have been answered. A request for a generation in which its sender
        has no place is refused.
        """
        member = request.member
        if member not in self._live or member in self._killed | self.left:
            return []
        place = self._generation if member in self._ranks else 0
        actions: list[Action] = []
        if refusal := self._find_refusal(request, place):
            actions = self._refuse(member, refusal, now_s)
        elif request.generation == place:
            self._accept(request, now_s)
        return [*actions, *self._settle(now_s)]

    def ended(self, member: int, *, failed: bool, now_s: float) -> list[Action]:
        """Handles the exit of a process.

        Args:
            member: number of the member or newcomer.
            failed: whether the exit code is not 0.
            now_s: current time.
        """
        if member not in self._live:
            return []
        self._live.remove(member)
        self._requests.pop(member, None)
        self._deadlines_s.pop(member, None)
        self._handovers.deadlines_s.pop(member, None)
        self._handovers.slow.discard(member)
        if self._is_over():
            return []
        actions: list[Action] = []
        if member in self.left:
            pass  # it has left the job, so its exit code does not matter
        elif member in self._ranks:
            if failed:
                self._failed.add(member)
                self._losses += 1
            else:
                self._is_ending = True
                # If enough members remain, the job is shrinking: the size stays, and
                # one member fewer has to leave.
                if len(self._members()) < self._target():
                    self._size = self._target() - 1
            if any(other not in self._requests for other in self._members()):
                actions.append(Fail(self._generation, member, self._ranks[member]))
        elif member not in self._surplus:
            self._losses += 1
            self.start_failures += member in self._unready
        self._unready.discard(member)
        return [*actions, *self._settle(now_s)]

    def resize(
        self, room: int, now_s: float, unwanted: Collection[int] = ()
    ) -> list[Action]:
        """Handles a change of the slots that the job may use.

        The new size is the number of slots, but at least `min_size`, and at most
        `max_size`. Nothing changes once a member has exited with code 0, since training
        is then at its end.

        If slots are added, or the slot of a further process is removed, the count of
        newcomers that exited before they were ready is reset to 0.

        Args:
            room: number of slots.
            now_s: current time.
            unwanted: processes on slots that were removed. Newcomers among them are
                killed; members among them leave once enough other members are ready.
        """
        is_ending = self._is_ending or self._is_preempting or self.preempted
        if self._is_over() or is_ending:
            return []
        size = min(max(room, self._min_size), self._max_size)
        # The room stays at least min_size, unless it is below min_size already, since
        # the slots of a lost host are gone.
        room = max(room, min(self._room, self._min_size))
        is_more = size > self._size or room > self._room
        if is_more or not self._unwanted.issuperset(unwanted):
            self.start_failures = 0
        self._size, self._room, self._unwanted = size, room, {*unwanted}
        return self._settle(now_s)

    def set_room(
        self, room: int, now_s: float, lost: Collection[int] = ()
    ) -> list[Action]:
        """Handles a change of the number of processes that fit on the hosts.

        Members that are already running may stay. An increase has no effect once a
        member has exited with code 0.

        Args:
            room: number of processes, excluding spares, that can run at the same time.
            now_s: current time.
            lost: processes on a host that was lost. They count as killed; `ended` must
                also be called for each of them.
        """
        if room < self._room or not self._is_ending:
            self._room = room
        self._killed.update(self._live.intersection(lost))
        return self._settle(now_s)

    def leave(self, member: int, now_s: float) -> list[Action]:
        """Handles a member's request to leave after a step, because it got SIGTERM.

        The member repeats this request in each generation until it is dismissed.
        """
        if self._is_over() or member not in self._members():
            return []
        self._handovers.leave(member, now_s)
        return self._settle(now_s)

    def replace(self, member: int, now_s: float) -> list[Action]:
        """Handles a member's request to be replaced because it is slow.

        A newcomer is started, unless there is a spare. The member leaves only when a
        newcomer is ready, so that the job does not run with fewer members in the
        meantime. If the job shrinks, the member leaves and is not replaced. Nothing
        happens if `reason_to_keep` returns a reason.
        """
        if self.reason_to_keep(member, now_s):
            return []
        self._slow, self._slow_since_s = member, now_s
        return self._settle(now_s)

    def at_step(
        self, member: int, generation: int, committed: int, now_s: float
    ) -> list[Action]:
        """Handles a member's answer to `AskStep`: its number of commits."""
        if generation != self._generation or member not in self._members():
            return []
        self._handovers.report(member, committed)
        return self._settle(now_s)

    def preempt(self, now_s: float) -> list[Action]:
        """Handles SIGTERM to the whole job: the members save after a step, and exit."""
        self._is_preempting = True
        return self._settle(now_s)

    def stopped(self, member: int, now_s: float) -> list[Action]:
        """Handles a process that cannot answer, for example because of SIGSTOP.

        While a round is open, the process is killed, even if it has sent its request,
        since it would not connect to the other members. While no round is open, nothing
        happens, since the process may continue. Therefore call this repeatedly, for
        example every second, as long as the process is stopped.
        """
        if member not in self._live or not self._is_open():
            return []
        reason = "it is stopped (SIGSTOP) while other ranks wait for it"
        return [*self._kill(member, reason), *self._settle(now_s)]

    def poll(self, now_s: float) -> list[Action]:
        """Kills processes that exceed a time limit. Call this every few seconds."""
        actions: list[Action] = []
        for member, deadline_s in self._handovers.deadlines_s.items():
            if now_s >= deadline_s:
                limit_s = self._handovers.limits_s[member]
                actions += self._kill(member, f"it did not end within {limit_s:g} s")
        if self._is_over():
            return actions
        if self._opened_s is not None and now_s >= self._opened_s + self._round_limit_s:
            reason = (
                f"it did not reach its commit within {self._round_limit_s:g} s after "
                "another rank had begun to wait for the next generation"
            )
            for member in self._members():
                if member not in self._requests:
                    actions += self._kill(member, reason)
        for member, deadline_s in self._deadlines_s.items():
            if now_s >= deadline_s:
                actions += self._kill(member, self._lateness(member))
        return [*actions, *self._settle(now_s)]
