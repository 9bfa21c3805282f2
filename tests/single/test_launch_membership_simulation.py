"""Simulated elastic jobs keep the rules of `tfdist.launch.membership`. Pure, seeded.

A violation names its seed: `world_of(seed).run()` replays it. That the simulation sees
violations is tested with memberships that break one rule each.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from helpers.membership_hosts import HostsWorld, ScriptWorld
from helpers.membership_referee import Violation
from helpers.membership_world import World

from tfdist.launch.membership import Membership
from tfdist.launch.membership_actions import (
    Announce,
    AskStep,
    Dismiss,
    EndAt,
    Fail,
    Kill,
)
from tfdist.launch.membership_state import START_FAILURES

SEEDS = 300
SCRIPT_SEEDS = 60
SLOW_SEEDS = 20_000
BROKEN_SEEDS = 2000  # within so many, the violation of a rule is found
BROKEN = {}  # memberships, each of which breaks a rule: where that is found
RARE = []  # those that break it in few worlds
# Parts of the reasons for which jobs stop.
STOPS = ("--min-np", "have room", "repeat", "not received", "of generation")


def world_of(seed, membership=Membership):
    """The world of a seed: in each third one, the hosts and their slots change."""
    kind = HostsWorld if seed % 3 == 2 else World
    return kind(seed, membership)


def run(seed, membership=Membership):
    """Runs one world; a violation, and any other error, names its seed."""
    world = world_of(seed, membership)
    try:
        return world, world.run()
    except Exception as error:
        raise Violation(f"seed {seed}: {error!r}") from error


def test_no_simulated_job_breaks_a_rule():
    outcomes, kinds, reasons = Counter(), Counter(), Counter()
    generations = slow = grown = left = 0
    for seed in range(SEEDS):
        world, outcome = run(seed)
        outcomes[outcome] += 1
        kinds += world.referee.given
        generations += world.referee.generation
        grown += max(world.referee.sizes) > world.referee.sizes[0]
        handed_over = world.referee.dismissed
        slow += len(handed_over & world.referee.were_slow)
        left += len(handed_over - world.referee.were_slow - world.terminated)
        reasons.update(part for part in STOPS if part in (world.referee.stop or ""))
    # The worlds are neither so quiet nor so deadly that they show nothing.
    assert min(outcomes["finished"], outcomes["stopped"]) > SEEDS / 5
    assert outcomes["preempted"] > SEEDS / 20
    assert generations > 2 * SEEDS and slow > SEEDS / 30
    assert min(grown, left) > SEEDS / 20
    assert len(kinds) == 11 and min(kinds.values()) > SEEDS / 20
    assert reasons.keys() == set(STOPS)


@pytest.mark.slow
def test_no_simulated_job_breaks_a_rule_in_many_worlds():
    for seed in range(SEEDS, SEEDS + SLOW_SEEDS):
        run(seed)


def check_script(seed):
    """Checks that a change of the slots alone neither ends ranks nor counts as loss."""
    world = ScriptWorld(seed)
    try:
        outcome = world.run()
    except Exception as error:
        raise Violation(f"seed {seed}: {error!r}") from error
    if outcome != "finished" or world.referee.restarts:
        raise Violation(f"seed {seed}: {outcome}, {world.referee.stop}")
    return world


def test_no_script_ends_a_job_or_its_ranks():
    moved = 0
    for seed in range(SCRIPT_SEEDS):
        world = check_script(seed)
        moved += bool(world.referee.unwanted & world.referee.dismissed)
    assert moved > SCRIPT_SEEDS / 10


@pytest.mark.slow
def test_no_script_ends_a_job_or_its_ranks_in_many_worlds():
    for seed in range(SCRIPT_SEEDS, SCRIPT_SEEDS + SLOW_SEEDS // 4):
        check_script(seed)


def test_a_seed_decides_everything():
    for seed in range(20):
        first, second = run(seed)[0], run(seed)[0]
        assert first.now_s == second.now_s
        assert first.referee.given == second.referee.given


# ---- memberships that break a rule ----


def broken(membership):
    BROKEN[membership] = world_of
    return membership


def rare(membership):
    """Marks one whose violation is found after seconds: the test of it is slow."""
    RARE.append(membership)
    return membership


def broken_on_hosts(membership):
    BROKEN[membership] = HostsWorld
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
        return self.start_failures < START_FAILURES


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


@rare
@broken
class EndsForWantOfSlowMembers(Membership):
    """Lets slow members leave although too few are left without them."""

    def _keep_needed_members(self):
        pass


@rare
@broken
class ForgetsThatMembersWait(Membership):
    """Gives no last step to members that were asked, when nobody leaves any more."""

    def _keep_needed_members(self):
        slow = set(self._handovers.slow)
        super()._keep_needed_members()
        if slow - self._handovers.slow:
            self._handovers._ended_generation = self._generation


@broken
class ReplacesSlowMembersAtOnce(Membership):
    def reason_to_keep(self, member, now_s):
        self._slow_since_s = None
        return super().reason_to_keep(member, now_s)


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


# ---- handovers ----


@broken
class HearsNobodyThatLeaves(Membership):
    def leave(self, member, now_s):
        return []


@broken
class EndsAtTheFirstAnswer(Membership):
    """Tells the last step before all have answered: a member may be beyond it."""

    def at_step(self, member, generation, committed, now_s):
        actions = super().at_step(member, generation, committed, now_s)
        is_new = generation == self._generation and member in self._members()
        if is_new and not actions and not self._is_open():
            return [EndAt(generation, committed + 1)]
        return actions


@broken
class EndsAtTheLowestStep(Membership):
    """Ends a generation at a step that some of its members have done before."""

    def _settle(self, now_s):
        steps = self._handovers._steps
        return [
            EndAt(action.generation, min(steps.values()) + 1)
            if isinstance(action, EndAt)
            else action
            for action in super()._settle(now_s)
        ]


@broken
class AsksForStepsAgain(Membership):
    def leave(self, member, now_s):
        actions = super().leave(member, now_s)
        if self._leaving() and not self._is_open() and not actions:
            return [AskStep(self._generation)]
        return actions


@broken
class DismissesBeforeTheEnd(Membership):
    """Dismisses a member before all members have ended the generation."""

    def request(self, request, now_s):
        actions = super().request(request, now_s)
        member = request.member
        if not actions and member in self._leaving() and member in self._requests:
            actions.append(Dismiss(member))
        return actions


@broken
class DismissesTheNewestState(Membership):
    def _dismiss(self, committed, now_s):
        return super()._dismiss(-1, now_s)


@broken
class DismissesNobody(Membership):
    def _dismiss(self, committed, now_s):
        return []


@broken
class CountsHandoversAsRestarts(Membership):
    def _dismiss(self, committed, now_s):
        dismissed = super()._dismiss(committed, now_s)
        self._losses += len(dismissed) if self._max_restarts else 0
        return dismissed


@broken
class TakesHandoversForLosses(Membership):
    """Treats the end of a member that was dismissed like a loss."""

    def ended(self, member, *, failed, now_s):
        was_left = member in self.left and member in self._live
        actions = super().ended(member, failed=failed, now_s=now_s)
        if was_left:
            actions.insert(0, Fail(self._generation, member, -1))
        return actions


@broken
class ReplacesAfterPreemption(Membership):
    def preempt(self, now_s):
        starts = [self._start(now_s)] if len(self._live) < self._size else []
        return [*super().preempt(now_s), *starts]


@broken
class IgnoresPreemption(Membership):
    def preempt(self, now_s):
        return self._settle(now_s)


@broken
class StopsInsteadOfSaving(Membership):
    """Takes members that have left for lost ones when too few are left."""

    def _must_end(self):
        if len(self._leaving()) == len(self._members()):
            return True
        return self._is_preempting or self.preempted


@broken
class SavesAndGoesOn(Membership):
    """Does not tell the members of the last generation that it is the last."""

    def _form(self, members, newcomers):
        return [
            replace(action, is_last=False)
            for action in super()._form(members, newcomers)
        ]


@broken
class AnnouncesAtHandovers(Membership):
    """Lets newcomers end a generation that is about to end at an agreed step."""

    def _end_generation(self):
        actions = super()._end_generation()
        if self._leaving() and self._ready() and self._announced < self._generation:
            self._announced = self._generation
            actions.append(Announce(self._generation))
        return actions


@rare
@broken
class WaitsForLateLeavers(Membership):
    def __init__(self, size, **options):
        super().__init__(size, **{**options, "leave_limit_s": math.inf})


# ---- growing and shrinking ----


@broken
class NeverGrows(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        return super().resize(min(wanted, self._size), now_s, unwanted)


@broken
class NeverShrinks(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        return super().resize(max(wanted, self._size), now_s, unwanted)


@broken
class GrowsWithoutLimit(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        self._max_size = max(self._max_size, wanted)
        return super().resize(wanted, now_s, unwanted)


@broken
class ShrinksBelowMinSize(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        least, self._min_size = self._min_size, 1
        actions = super().resize(wanted, now_s, unwanted)
        self._min_size = least
        return actions


@broken
class ChangesItsSizeAtTheEnd(Membership):
    """Replaces members that have finished if the job may grow."""

    def resize(self, wanted, now_s, unwanted=()):
        self._is_ending = False
        return super().resize(wanted, now_s, unwanted)


@broken
class StartsWithoutRoom(Membership):
    """Starts processes although no host has room for them."""

    def set_room(self, room, now_s, lost=()):
        return super().set_room(self._room, now_s, lost)


@broken
class JoinsWithoutRoom(Membership):
    """Lets spares join although no host has room for more members."""

    def _vacancies(self):
        return max(0, self._size - len(self._members()) + len(self._leaving()))

    def _end_generation(self):
        room, self._room = self._room, self._max_size
        actions = super()._end_generation()
        self._room = room
        return actions


@broken
class FormsGenerationsWithLostHosts(Membership):
    """Takes a process on a lost host for alive until its own end is reported."""

    def set_room(self, room, now_s, lost=()):
        return super().set_room(room, now_s)


@broken
class WaitsForRoomInVain(Membership):
    """Waits for processes for which no host has room."""

    def _largest_size(self):
        room, self._room = self._room, self._max_size
        size = super()._largest_size()
        self._room = room
        return size


@broken
class TheLowestRanksLeave(Membership):
    def _leaving(self):
        asked = self._asked_to_leave()
        surplus = len(super()._leaving()) - len(asked)
        staying = [m for m in self._members() if m not in {*asked, *self._killed}]
        return [*asked, *staying[:surplus]]


@broken
class TooManyLeave(Membership):
    """Does not count those that leave anyway, because of SIGTERM."""

    def _leaving(self):
        staying = [m for m in self._members() if m not in self._killed]
        return [*{*self._asked_to_leave(), *staying[self._size :]}]


@broken
class KillsMembersThatAreTooMany(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        actions = super().resize(wanted, now_s, unwanted)
        if not self._is_over():
            for member in {*self._leaving()} - {*self._asked_to_leave()}:
                actions += self._kill(member, "")
        return actions


@broken
class LeavesMembersWaiting(Membership):
    """Tells no last step if nobody leaves any more after the members were asked."""

    def _end_generation(self):
        if self._leaving() or self._is_preempting:
            return super()._end_generation()
        has_asked = self._handovers.has_asked
        self._handovers.has_asked = lambda generation: False
        actions = super()._end_generation()
        self._handovers.has_asked = has_asked
        return actions


@broken
class CountsGrowthAsRestarts(Membership):
    def _free_starts(self):
        return 0


@broken
class RemembersLossesOfALargerJob(Membership):
    """Counts a process as a restart if ranks were lost before the job shrank."""

    def _settle(self, now_s):
        losses = self._losses
        actions = super()._settle(now_s)
        starts = sum(type(action).__name__ == "Start" for action in actions)
        self._losses = max(self._losses, losses - starts)
        return actions


@broken
class KeepsUselessNewcomers(Membership):
    def _surplus_newcomers(self):
        return []


@broken
class KillsTheFirstNewcomers(Membership):
    """Kills newcomers that are ready, and keeps others that are not."""

    def _surplus_newcomers(self):
        surplus = len(super()._surplus_newcomers())
        return [*self._ready(), *self._preparing()][:surplus]


@broken
class CountsUselessNewcomersAsLost(Membership):
    def ended(self, member, *, failed, now_s):
        self._surplus.discard(member)
        return super().ended(member, failed=failed, now_s=now_s)


@broken
class NeverTriesAgain(Membership):
    """Starts nobody in a job that grows if newcomers failed before."""

    def resize(self, wanted, now_s, unwanted=()):
        failures = self.start_failures
        actions = super().resize(wanted, now_s, unwanted)
        self.start_failures = failures
        return actions


@rare
@broken
class TriesAgainInASmallerJob(Membership):
    def resize(self, wanted, now_s, unwanted=()):
        if wanted < self._size:
            self.start_failures = 0
        return super().resize(wanted, now_s, unwanted)


# ---- removed slots ----


@broken_on_hosts
class KeepsMembersOnRemovedSlots(Membership):
    def resize(self, room, now_s, unwanted=()):
        return super().resize(room, now_s)


@broken_on_hosts
class LeavesRemovedSlotsBelowMinSize(Membership):
    """Lets members on removed slots leave although too few are left without them."""

    def _fewest_staying(self):
        return 1


@broken_on_hosts
class WaitsUntilNewcomersHaveJoined(Membership):
    """Does not count newcomers that are ready: they wait for the places."""

    def _fewest_staying(self):
        return self._min_size


@broken_on_hosts
class KeepsNobodyThatHasTheState(Membership):
    """Lets all members leave when enough newcomers are ready."""

    def _fewest_staying(self):
        return super()._fewest_staying() - 1


@broken_on_hosts
class TheHighestRanksLeaveRemovedSlots(Membership):
    """Lets as many members leave as have to, but others."""

    def _leaving(self):
        asked = self._asked_to_leave()
        count = len(super()._leaving()) - len(asked)
        others = [m for m in self._members() if m not in {*asked, *self._killed}]
        others.sort(key=lambda member: (member == self._slow, self._ranks[member]))
        return [*asked, *others[len(others) - count :]]


@broken_on_hosts
class KeepsNewcomersOnRemovedSlots(Membership):
    def _surplus_newcomers(self):
        return [m for m in super()._surplus_newcomers() if m not in self._unwanted]


@broken_on_hosts
class WaitsUntilRemovedSlotsAreEmpty(Membership):
    """Starts nobody beside members that stay until others have joined."""

    def _needs_process(self):
        return len(self._live) < self._wanted_processes()


@broken_on_hosts
class CannotMoveTheLastMember(Membership):
    def _openings(self, members):
        return self._target() - len(members)


@broken_on_hosts
class ReplacesSlowMembersOnRemovedSlots(Membership):
    """Starts one more process for a slow member that leaves anyway."""

    def _is_going(self, member):
        return member in self._leaving()


# ---- slow members of a job that grows or shrinks ----


@rare
@broken
class KeepsSlowMembersOfASmallerJob(Membership):
    """Lets the highest ranks leave, although another member waits to be replaced."""

    def _leaving(self):
        slow, self._slow = self._slow, None
        leaving = super()._leaving()
        self._slow = slow
        return leaving


@rare
@broken
class ReplacesSlowMembersOfASmallerJob(Membership):
    """Starts a replacement of a slow member that leaves because the job shrinks."""

    def _wanted_spares(self):
        waits = self._slow in self._members() and self._max_restarts > 0
        return max(self._spares, waits)


@broken
class KillsReplacementsOfSlowMembers(Membership):
    """Keeps only the newcomers that have a place already."""

    def _surplus_newcomers(self):
        useful = self._vacancies() + self._spares
        newcomers = [*self._ready(), *self._preparing()]
        return super()._surplus_newcomers() and newcomers[useful:]


@broken
class CountsReplacementsOfSlowMembersAsRestarts(Membership):
    def replace(self, member, now_s):
        if not self.reason_to_keep(member, now_s):
            self._losses += 1
        return super().replace(member, now_s)


@broken
class ForgetsLossesWhenSlowMembersLeave(Membership):
    """Takes the replacement of a slow member for that of a lost one."""

    def _missing(self):
        leaving = len(self._leaving())
        return max(0, super()._missing() - leaving)


@broken
class ReplacesSlowMembersByThoseThatGrow(Membership):
    """Uses newcomers that the job needs, although no others can be started."""

    def _may_replace(self):
        return bool(self._ready() or self._preparing()) or super()._may_replace()


@broken
class LeavesNeededNewcomersInTheBackground(Membership):
    def _prioritize(self, now_s):
        return []


@broken
class StartsSparesLikeReplacements(Membership):
    def _start(self, now_s, *, with_ranks=False):
        return replace(super()._start(now_s), in_background=False)


@broken
class StartsReplacementsInTheBackground(Membership):
    def _start(self, now_s, *, with_ranks=False):
        start = super()._start(now_s, with_ranks=with_ranks)
        return replace(start, in_background=not with_ranks)


@broken
class StartsFirstSparesInTheBackground(Membership):
    def _start(self, now_s, *, with_ranks=False):
        return super()._start(now_s)


@pytest.mark.parametrize(
    "membership",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one in RARE else [])
        for one in BROKEN
    ],
    ids=lambda broken: broken.__name__,
)
def test_the_simulation_finds_a_broken_rule(membership):
    for seed in range(BROKEN_SEEDS):
        try:  # not `run`: an error of the broken membership itself finds nothing
            BROKEN[membership](seed, membership).run()
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
