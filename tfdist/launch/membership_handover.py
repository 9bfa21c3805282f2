"""Lets members of an elastic job leave without losing a step.

A *handover* loses no step. The members of the generation report how many steps they
have committed, and wait at their next commit for the step after which the generation
ends on all of them. It is one more than the largest report: no member can have passed
it. There, all members request their places, and those that leave are dismissed.
"""

from __future__ import annotations

from collections.abc import Collection

from tfdist.launch.membership_actions import Action, AskStep, EndAt


class Handovers:
    """The members that leave, and the end of the generation that they leave.

    Args:
        limit_s: seconds from SIGTERM to a member's end, after which it is killed.

    Attributes:
        deadlines_s: when each member that got SIGTERM, is replaced because it is slow,
            or was dismissed, has to have ended.
        limits_s: how long each of them has had until then.
        slow: members that leave because they are slow, and not after SIGTERM.
        dismissed: members that have left; their processes may not have ended yet.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.deadlines_s: dict[int, float] = {}
        self.limits_s: dict[int, float] = {}
        self.slow: set[int] = set()
        self.dismissed: set[int] = set()
        self._asked_generation = 0  # the last one whose members were asked
        self._ended_generation = 0  # the last one that was given its last step
        self._steps: dict[int, int] = {}  # commits of the members that have reported

    def leave(self, member: int, now_s: float) -> None:
        """Notes that a member got SIGTERM; the first call for it counts."""
        if member not in self.deadlines_s or member in self.slow:
            self.slow.discard(member)
            self._set_limit(member, now_s, self._limit_s)

    def leave_as_slow(self, member: int, now_s: float, limit_s: float) -> None:
        """Lets a slow member leave, unless it leaves already.

        Args:
            member: number of the member.
            now_s: current time.
            limit_s: seconds after which it is killed.
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
        """Notes that a member has left its generation, and has to end."""
        self.dismissed.add(member)
        self.slow.discard(member)
        if member not in self.deadlines_s:
            self._set_limit(member, now_s, self._limit_s)

    def report(self, member: int, committed: int) -> None:
        """Notes how many steps a member of the newest generation has committed."""
        self._steps[member] = committed

    def has_asked(self, generation: int) -> bool:
        """Returns whether the members of a generation were asked for their steps."""
        return self._asked_generation == generation

    def end_generation(self, generation: int, members: Collection[int]) -> list[Action]:
        """Returns the actions that end the running generation at one step.

        Args:
            generation: number of the generation.
            members: its live members.
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
