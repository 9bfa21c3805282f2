"""Lets members of an elastic job leave without losing a step.

In a *handover*, the members of the generation report how many steps they have
committed. At its next commit, each member waits to be told after which step the
generation ends. This step is one more than the largest reported number, which no member
can have passed. After it, all members request their places, and those that leave are
dismissed.
"""

from __future__ import annotations

from collections.abc import Collection

from tfdist.launch.membership_actions import Action, AskStep, EndAt


class Handovers:
    """The members that leave, and the end of the generation that they leave.

    Args:
        limit_s: seconds after SIGTERM at which a member that has not exited is killed.

    Attributes:
        deadlines_s: member → time by which it must have exited. The members are those
            that got SIGTERM, are replaced because they are slow, or were dismissed.
        limits_s: member → time limit in seconds that led to its deadline.
        slow: members that leave because they are slow, and not after SIGTERM.
        dismissed: members that have left; their processes may still be running.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.deadlines_s: dict[int, float] = {}
        self.limits_s: dict[int, float] = {}
        self.slow: set[int] = set()
        self.dismissed: set[int] = set()
        self._asked_generation = 0  # the last generation whose members were asked
        self._ended_generation = 0  # the last generation that was told its last step
        self._steps: dict[int, int] = {}  # member → reported number of commits

    def leave(self, member: int, now_s: float) -> None:
        """Sets the deadline of a member that got SIGTERM, at the first call for it."""
        if member not in self.deadlines_s or member in self.slow:
            self.slow.discard(member)
            self._set_limit(member, now_s, self._limit_s)

    def leave_as_slow(self, member: int, now_s: float, limit_s: float) -> None:
        """Lets a slow member leave, unless it is already leaving.

        Args:
            member: number of the member.
            now_s: current time.
            limit_s: seconds from now at which the member is killed.
        """
        if member not in self.deadlines_s:
            self.slow.add(member)
            self._set_limit(member, now_s, limit_s)

    def keep_slow(self) -> None:
        """Lets the slow members stay."""
        for member in self.slow:
            self.deadlines_s.pop(member, None)
        self.slow.clear()

    def _set_limit(self, member: int, now_s: float, limit_s: float) -> None:
        self.limits_s[member] = limit_s
        self.deadlines_s[member] = now_s + limit_s

    def dismiss(self, member: int, now_s: float) -> None:
        """Records that a member has left the job, and has to exit."""
        self.dismissed.add(member)
        self.slow.discard(member)
        if member not in self.deadlines_s:
            self._set_limit(member, now_s, self._limit_s)

    def report(self, member: int, committed: int) -> None:
        """Records how many steps a member of the newest generation has committed."""
        self._steps[member] = committed

    def has_asked(self, generation: int) -> bool:
        """Returns whether members of a generation were asked for their commits."""
        return self._asked_generation == generation

    def end_generation(self, generation: int, members: Collection[int]) -> list[Action]:
        """Returns the actions that end the running generation after the same step.

        The first call for a generation asks its members for their numbers of commits.
        Once all of them have reported, the next call returns an `EndAt`.

        Args:
            generation: number of the generation.
            members: live members of the generation.
        """
        actions: list[Action] = []
        if self._asked_generation < generation:
            self._asked_generation = generation
            self._steps = {}
            actions.append(AskStep(generation))
        elif self._ended_generation < generation and self._steps.keys() >= set(members):
            self._ended_generation = generation
            last = max(self._steps[member] for member in members) + 1
            actions.append(EndAt(generation, last))
        return actions
