"""Simulated elastic jobs keep the rules of `tfdist.launch.membership`. Pure, seeded.

A violation names its seed: `World(seed).run()` replays it. That the simulation sees
violations is tested with memberships that break one rule each.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from helpers.membership_referee import Violation
from helpers.membership_world import World

from tfdist.launch import membership as rules
from tfdist.launch.membership import Fail, Kill, Membership

SEEDS = 300
SLOW_SEEDS = 20_000
BROKEN_SEEDS = 500  # within so many, the violation of a rule is found
BROKEN = []  # memberships, each of which breaks a rule
STOPS = ("--min-np", "repeat", "not received", "of generation")  # in their reasons


def run(seed, membership=Membership):
    """Runs one world; a violation, and any other error, names its seed."""
    world = World(seed, membership)
    try:
        return world, world.run()
    except Exception as error:
        raise Violation(f"seed {seed}: {error!r}") from error


def test_no_simulated_job_breaks_a_rule():
    outcomes, kinds, reasons, generations = Counter(), Counter(), Counter(), 0
    for seed in range(SEEDS):
        world, outcome = run(seed)
        outcomes[outcome] += 1
        kinds += world.referee.given
        generations += world.referee.generation
        reasons.update(part for part in STOPS if part in (world.referee.stop or ""))
    # The worlds are neither so quiet nor so deadly that they show nothing.
    assert min(outcomes["finished"], outcomes["stopped"]) > SEEDS / 5
    assert generations > 2 * SEEDS
    assert len(kinds) == 7 and min(kinds.values()) > SEEDS / 20
    assert reasons.keys() == set(STOPS)


@pytest.mark.slow
def test_no_simulated_job_breaks_a_rule_in_many_worlds():
    for seed in range(SEEDS, SEEDS + SLOW_SEEDS):
        run(seed)


def test_a_seed_decides_everything():
    for seed in range(20):
        first, second = run(seed)[0], run(seed)[0]
        assert first.now_s == second.now_s
        assert first.referee.given == second.referee.given


# ---- memberships that break a rule ----


def broken(membership):
    BROKEN.append(membership)
    return membership


@broken
class ClosesWithoutTheLast(Membership):
    """Closes a round although a member has not asked: the member may still run."""

    def _members(self):
        members = super()._members()
        asked = [member for member in members if member in self._requests]
        return asked if len(asked) == len(members) - 1 > 0 else members


@broken
class TakesKilledForEnded(Membership):
    """Does not wait for the end of a killed member, which may still run."""

    def _members(self):
        return [m for m in super()._members() if m not in self._killed]


@broken
class HearsKilledMembers(Membership):
    """Grants the request of a killed member that comes before its end."""

    def request(self, request, now_s):
        self._killed.discard(request.member)
        return super().request(request, now_s)


@broken
class KillsThoseThatHaveAsked(Membership):
    """Kills a member that is named as failed although it has asked in time."""

    def request(self, request, now_s):
        actions = super().request(request, now_s)
        for other in self._members():
            is_of_now = request.generation == self._generation
            if is_of_now and self._ranks[other] in request.failed:
                actions += self._kill(other, "")
        return actions


@broken
class TakesOldRequests(Membership):
    """Takes the late copy of an answered request for a new one."""

    def request(self, request, now_s):
        if 0 < request.generation < self._generation:
            request = replace(request, generation=self._generation)
        return super().request(request, now_s)


@broken
class KillsNobodyThatIsNamed(Membership):
    """Waits for members that are named as failed; some of them never ask."""

    def _accept(self, request, now_s):
        super()._accept(replace(request, failed=()), now_s)

    def poll(self, now_s):
        self._opened_s = now_s
        return super().poll(now_s)


@broken
class IgnoresMinSize(Membership):
    def __init__(self, size, *, min_size, **options):
        del min_size
        super().__init__(size, min_size=1, **options)


@broken
class WaitsForNoReplacement(Membership):
    """Stops with too few members although replacements are on their way."""

    def _largest_size(self):
        return 0


@broken
class WaitsWithoutReplacements(Membership):
    """Waits with too few members although no replacement will come."""

    def _largest_size(self):
        return self._min_size


@broken
class StartsWithoutLimit(Membership):
    def _may_start(self):
        return self.start_failures < rules.START_FAILURES


@broken
class StartsInSpiteOfFailures(Membership):
    def _may_start(self):
        return self.restarts < self._max_restarts


@broken
class CountsAllStartFailures(Membership):
    """Counts newcomers that ended early even if others became ready in between."""

    def _accept(self, request, now_s):
        count = self.start_failures
        super()._accept(request, now_s)
        self.start_failures = count


@broken
class ReplacesFinishedMembers(Membership):
    def ended(self, member, *, failed, now_s):
        if not failed and member in self._ranks and member in self._live:
            self._size += 1
        return super().ended(member, failed=failed, now_s=now_s)


@broken
class ReplacesNobody(Membership):
    def _may_start(self):
        return False


@broken
class WaitsForSilentMembers(Membership):
    def __init__(self, size, **options):
        super().__init__(size, **{**options, "round_limit_s": math.inf})


@broken
class WaitsForSilentNewcomers(Membership):
    def __init__(self, size, **options):
        super().__init__(size, **{**options, "start_limit_s": math.inf})


@broken
class AnnouncesNobody(Membership):
    def _settle(self, now_s):
        self._announced = self._generation
        return super()._settle(now_s)


@broken
class ReportsNoEnd(Membership):
    def ended(self, member, *, failed, now_s):
        actions = super().ended(member, failed=failed, now_s=now_s)
        return [action for action in actions if not isinstance(action, Fail)]


@broken
class ContinuesWithoutState(Membership):
    """Forms generations of newcomers that have not received the state."""

    def _accept(self, request, now_s):
        known = max(request.committed, 0) if request.generation else -1
        super()._accept(replace(request, committed=known), now_s)


@broken
class MixesPrograms(Membership):
    def request(self, request, now_s):
        return super().request(replace(request, program=""), now_s)


@broken
class RepeatsForever(Membership):
    """Never stops although the same failure repeats."""

    def _close(self, now_s):
        self._rounds_without_step = 0
        return super()._close(now_s)


@broken
class CountsGenerationsOfGrowth(Membership):
    """Counts generations that were formed only because newcomers join."""

    def _form(self, members, newcomers):
        if len(members) == len(self._ranks):
            self._rounds_without_step += 1
        return super()._form(members, newcomers)


@broken
class RanksByArrival(Membership):
    """Gives newcomers the ranks above all others, whatever ranks are free."""

    def _form(self, members, newcomers):
        actions = super()._form(members, newcomers)
        order = [*members, *newcomers]
        return [replace(action, rank=order.index(action.member)) for action in actions]


@broken
class AnswersAfterStop(Membership):
    def _stop(self, reason, now_s):
        actions = super()._stop(reason, now_s)
        self.stop_reason = ""
        return actions


@broken
class LeavesNewcomers(Membership):
    """Does not end the newcomers when the job has finished."""

    def _kill(self, member, reason):
        return [] if "finished" in reason else super()._kill(member, reason)


@pytest.mark.parametrize("membership", BROKEN, ids=lambda broken: broken.__name__)
def test_the_simulation_finds_a_broken_rule(membership):
    for seed in range(BROKEN_SEEDS):
        try:  # not `run`: an error of the broken membership itself finds nothing
            World(seed, membership).run()
        except Violation:
            return
    pytest.fail(f"no violation in {BROKEN_SEEDS} worlds")


class HastyLauncher(World):
    """Reports the end of a process when it sends SIGKILL, not when the end is known."""

    def _carry_out(self, actions):
        super()._carry_out(actions)
        for action in actions:
            if isinstance(action, Kill):
                self._on_end(self.processes[action.member], failed=True)


def test_the_simulation_finds_a_process_that_outlives_its_generation():
    with pytest.raises(Violation, match="no member runs the old generation"):
        for seed in range(BROKEN_SEEDS):
            HastyLauncher(seed).run()
