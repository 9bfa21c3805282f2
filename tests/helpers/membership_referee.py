"""Checks each action of a `tfdist.launch.membership.Membership` against the rules.

The referee records what the membership has been told and what it has decided. It shares
no code with the membership. Facts that the membership cannot know, for example whether
a process really has ended, come from the simulated world.
"""

from collections import Counter

from tfdist.launch.membership_actions import Answer, Fail, Refuse
from tfdist.launch.membership_state import (
    BACKGROUND_LIMIT_S,
    MOST_ROUNDS,
    START_FAILURES,
)


class Violation(AssertionError):
    """A rule of the membership was broken."""


def require(holds, rule, *facts):
    if not holds:
        raise Violation(f"broken rule: {rule}; {facts}")


class Referee:
    """Passes events on to a membership, and checks the actions that it returns.

    Args:
        membership: the membership that is tested.
        world: object with `is_gone(member)`, `is_asking(member, generation)`,
            `wants_to_leave(member)` (whether it got SIGTERM, or is slow),
            `committed_of(member)`, `program_of(member)` and `floor()`.
        settings: arguments of the membership by name.
    """

    def __init__(self, membership, world, settings):
        self.membership, self.world, self.settings = membership, world, settings
        self.wanted = settings["size"]
        self.room = settings["max_size"]  # for processes, the spares excluded
        self.unwanted = set()  # processes on slots that were removed
        self.generation = 1
        self.ranks = {member: member for member in range(self.wanted)}
        self.live = set(range(self.wanted))
        self.failed, self.finished = set(), set()
        self.killed, self.refused = set(), set()
        self.requests = {}  # of members, for the newest generation
        self.ready, self.were_ready = {}, set()
        self.named = set()  # members that a request names as failed
        self.opened_s = None
        self.deadline_s = {}
        self.program = ""
        self.announced = set()
        self.started = self.restarts = self.start_failures = 0
        self.spares_left = settings["spares"]  # that `begin` has to start
        self.best_at_failure, self.without_step = -1, 0
        self.stop = None  # the reason
        self.given = Counter()  # number of actions of each kind
        self.stopped_now = None  # the member of the event `stopped`
        self.leave_by_s = {}  # of the members that want to leave
        self.dismissed = set()
        self.lost = 0  # processes that were lost, and not replaced yet
        self.shed = set()  # newcomers that were killed because the job shrinks
        self.is_ending = False  # a member has finished
        self.asked = set()  # generations whose members were asked for their steps
        self.steps = {}  # their answers, in the newest generation
        self.sizes = [self.wanted]  # of all generations
        self.ends = {}  # generation: its last step
        self.preempting = self.preempted = False
        self.slow = None  # the member that leaves when a newcomer is ready
        self.slow_since_s = -float("inf")
        self.slow_leaving = set()  # members that leave because they are slow
        self.were_slow = set()  # members that were to be replaced
        # Newcomers with a smaller share of the CPUs: until when at most.
        self.background = {}

    # ---- events ----

    def begin(self, now_s):
        actions = self._check(self.membership.begin(now_s), now_s)
        require(self.spares_left == 0, "all spares are started", actions)
        return actions

    def request(self, request, now_s):
        member = request.member
        is_heard = member in self.live - self.killed - self.dismissed
        if is_heard and self.stop is None and member not in self.refused:
            self._record(request, now_s)
        actions = self.membership.request(request, now_s)
        if is_heard and self.stop is not None:
            refusals = [action for action in actions if isinstance(action, Refuse)]
            require(refusals, "requests are refused after Stop", request)
        return self._check(actions, now_s)

    def _record(self, request, now_s):
        member = request.member
        if member in self.ranks and request.generation == self.generation:
            self.requests[member] = request
            self.program = request.program or self.program
            if self.opened_s is None:
                self.opened_s = now_s
            by_rank = {rank: number for number, rank in self.ranks.items()}
            self.named |= {by_rank[rank] for rank in request.failed}
        elif member not in self.ranks and request.generation == 0:
            if not self._differs(request):
                if member not in self.were_ready:
                    self.start_failures = 0
                self.were_ready.add(member)
                self.ready[member] = request
                self.deadline_s.pop(member, None)

    def ended(self, member, failed, now_s):
        if member not in self.live:
            again = self.membership.ended(member, failed=failed, now_s=now_s)
            require(not again, "a second report of an end is ignored", again)
            return again
        must_tell = False
        self.live.remove(member)
        self.ready.pop(member, None)
        if member in self.dismissed | self.shed:
            pass
        elif member in self.ranks:
            (self.failed if failed else self.finished).add(member)
            if not failed and len(self.members()) < self.target():
                self.wanted = self.target() - 1
            self.is_ending |= not failed
            self.lost += failed
            self.requests.pop(member, None)
            others = self.members()
            must_tell = self.stop is None and bool(others - self.requests.keys())
        else:
            self.lost += 1
            self.start_failures += member not in self.were_ready
        if not self.is_open():
            self.opened_s = None
        actions = self.membership.ended(member, failed=failed, now_s=now_s)
        if must_tell:
            expected = Fail(self.generation, member, self.ranks[member])
            require(expected in actions, "the end of a member is reported", expected)
        return self._check(actions, now_s)

    def leave(self, member, now_s):
        if member in self.members() and self.stop is None and not self.has_finished():
            limit_s = now_s + self.settings["leave_limit_s"]
            if member in self.slow_leaving:
                self.slow_leaving.remove(member)
                del self.leave_by_s[member]
            self.leave_by_s.setdefault(member, limit_s)
        return self._check(self.membership.leave(member, now_s), now_s)

    def resize(self, slots, now_s, unwanted=frozenset()):
        is_over = self.stop is not None or self.has_finished() or self.is_ending
        if not is_over and not self.preempting and not self.preempted:
            least, most = self.settings["min_size"], self.settings["max_size"]
            size = min(most, max(least, slots))
            room = max(slots, min(self.room, least))  # no slots of a lost host
            if size > self.wanted or room > self.room or unwanted - self.unwanted:
                self.start_failures = 0
            self.wanted, self.room, self.unwanted = size, room, unwanted
            for member in unwanted:
                self.ready.pop(member, None)
        return self._check(self.membership.resize(slots, now_s, unwanted), now_s)

    def set_room(self, room, lost, now_s):
        if room < self.room or not self.is_ending:
            self.room = room
        self.killed |= self.live & {*lost}
        for member in lost:
            self.ready.pop(member, None)
        return self._check(self.membership.set_room(room, now_s, lost), now_s)

    def replace(self, member, now_s):
        reason = self.membership.reason_to_keep(member, now_s)
        if not reason:
            pause_s = now_s - self.slow_since_s
            require(
                pause_s >= self.settings["replace_every_s"],
                "slow members are replaced now and then",
                member,
            )
            require(member in self.members(), "members are replaced", member)
            self.slow, self.slow_since_s = member, now_s
            self.were_slow.add(member)
        return self._check(self.membership.replace(member, now_s), now_s)

    def _update_slow(self, now_s):
        """Notes that the slow member leaves, or is not replaced any more."""
        is_waiting = self.slow is not None and self.slow not in self._going()
        if self.stop is not None or not is_waiting:
            return
        may_start = self.settings["max_restarts"] > 0
        may_start = may_start and self.start_failures < START_FAILURES
        newcomers = len(self.ready) + len(self._preparing())
        may_replace = may_start or newcomers > self._vacancies()
        if self.slow not in self.members() or not may_replace:
            self.slow = None
        elif self.ready:
            self.leave_by_s[self.slow] = now_s + self.settings["round_limit_s"]
            self.slow_leaving.add(self.slow)
            self.slow = None

    def _keep_needed(self):
        """Slow members stay if the job would end without them."""
        self.slow_leaving &= self.members()
        if self.slow_leaving and self.stop is None and self.must_save():
            for member in self.slow_leaving:
                del self.leave_by_s[member]
            self.slow_leaving = set()

    def _most_spare(self):
        """How many newcomers are kept that have no place yet."""
        is_waiting = self.slow in self.members() and self.slow not in self._going()
        is_replaced = is_waiting and self.settings["max_restarts"] > 0
        return max(self.settings["spares"], is_replaced)

    def at_step(self, member, generation, committed, now_s):
        if generation == self.generation and member in self.members():
            self.steps[member] = committed
        actions = self.membership.at_step(member, generation, committed, now_s)
        return self._check(actions, now_s)

    def preempt(self, now_s):
        self.preempting = True
        return self._check(self.membership.preempt(now_s), now_s)

    def stopped(self, member, now_s):
        self.stopped_now = member
        actions = self._check(self.membership.stopped(member, now_s), now_s)
        self.stopped_now = None
        return actions

    def poll(self, now_s):
        return self._check(self.membership.poll(now_s), now_s)

    # ---- the state, by this record ----

    def members(self):
        """The live members of the newest generation that were not dismissed."""
        return (self.live & self.ranks.keys()) - self.dismissed

    def signalled(self):
        """The members that got SIGTERM, or leave because they are slow."""
        return self.members() & self.leave_by_s.keys()

    def leaving(self):
        """The members that got SIGTERM or are replaced, and those that are too many.

        Members on removed slots leave as far as enough are left. If there are too many,
        a member that is to be replaced leaves first, and then the highest ranks.
        """
        leaving = self.signalled()
        staying = self.members() - leaving - self.killed
        joining = len(self.ready) if self.target() >= self._least() else 0
        needed = max(1, self._least() - joining)
        while (on_removed := staying & self.unwanted) and len(staying) > needed:
            self._let_one_leave(on_removed, staying, leaving)
        while len(staying) > self.wanted:
            on_removed = staying & self.unwanted
            self._let_one_leave(on_removed or staying, staying, leaving)
        return leaving

    def _let_one_leave(self, candidates, staying, leaving):
        highest = max(candidates, key=lambda member: self.ranks[member])
        leaver = self.slow if self.slow in candidates else highest
        staying.remove(leaver)
        leaving.add(leaver)

    def _going(self):
        """The members that leave now, or when others have joined."""
        return self.leaving() | self.unwanted

    def _least(self):
        return self.settings["min_size"]

    def must_save(self):
        """Whether the members save and end when their round closes."""
        if self.preempting or self.preempted:
            return True
        staying = self.members() - self.leaving()
        hopeless = not self._can_become_enough(staying)
        return bool(self.leaving()) and (not staying or hopeless)

    def is_open(self):
        return bool(self.members() & self.requests.keys())

    def has_finished(self):
        """Whether the whole newest generation has ended with exit code 0."""
        return self.ranks.keys() - self.dismissed <= self.finished

    def _differs(self, request):
        are_known = self.program and request.program
        return bool(are_known) and self.program != request.program

    def _preparing(self):
        gone = {*self.ranks, *self.ready, *self.killed, *self.refused, *self.unwanted}
        return self.live - gone - self.dismissed

    def target(self):
        """The largest number of members that there is room for."""
        return min(self.wanted, self.room)

    def _vacancies(self):
        return max(0, self.target() - len(self.members() - self._going()))

    def useless(self):
        """The newcomers that a job does not need any more, because it has shrunk."""
        needed = self._vacancies() + self._most_spare()
        newcomers = [*self.ready, *sorted(self._preparing())][needed:]
        return [*self.misplaced(), *newcomers]

    def misplaced(self):
        """The newcomers on removed slots."""
        newcomers = self.live - self.ranks.keys() - self.dismissed - self.killed
        return newcomers & self.unwanted

    def _needed(self):
        """The newcomers that can take vacant places first."""
        newcomers = [*self.ready, *sorted(self._preparing())]
        return {*newcomers[: self._vacancies()]}

    def _missing(self):
        """The number of processes that are missing as soon as members have left."""
        there = self.live - self.dismissed - self.shed - self._going()
        is_useful = self.wanted >= self.settings["min_size"]
        wanted = self.target() + self._most_spare() if is_useful else 0
        return max(0, wanted - len(there))

    def _free_starts(self):
        """The number of starts that take the place of no lost process."""
        are_replaced = self.settings["max_restarts"] > 0
        not_replaced = 0 if are_replaced else len(self.signalled())
        return max(0, self._missing() - self.lost - not_replaced)

    def _starts_left(self, preparing=0):
        if self.start_failures >= START_FAILURES and not preparing:
            return 0
        most = self.settings["max_restarts"]
        return most - self.restarts + self._free_starts()

    def has_room(self):
        return self._openings(self.members()) > 0

    def _openings(self, members):
        """How many newcomers can join; one if the only member is on a removed slot."""
        is_last = len(members) == 1 and members <= self.unwanted
        return max(self.target() - len(members), is_last)

    def _is_enough(self, members):
        there = min(self.target(), len(members) + len(self.ready))
        there = max(there, len(members))
        return there >= self.settings["min_size"]

    def _can_become_enough(self, members):
        preparing = len(self._preparing())
        there = len(members) + len(self.ready) + preparing
        most = min(self.target(), there + self._starts_left(preparing))
        return most >= self.settings["min_size"]

    def _rounds_without_step(self, members):
        """The count of such rounds if these members formed a generation now."""
        if self.ranks.keys() <= self.live | self.dismissed:
            return self.without_step
        best = max(self.requests[member].committed for member in members)
        return self.without_step + 1 if best <= self.best_at_failure else 0

    # ---- checks ----

    def _check(self, actions, now_s):
        answers = [action for action in actions if isinstance(action, Answer)]
        if self.members():
            self._keep_needed()
        for action in actions:
            kind = type(action).__name__
            self.given[kind] += 1
            is_shed = kind == "Kill" and "no longer needed" in action.reason
            is_shed = is_shed and action.member not in self.useless()
            if kind in ("AskStep", "Start", "Prioritize") or is_shed:
                self._update_slow(now_s)
                self._keep_needed()
            getattr(self, f"_check_{kind.lower()}")(action, now_s)
            if kind == "Refuse" and self.members():
                self._keep_needed()
            if answers and action is answers[-1]:
                self._check_generation(answers, now_s)
        is_saved = self.preempted and not self.members()
        if not self.has_finished():
            self._update_slow(now_s)
            self._keep_needed()
        self.lost = min(self.lost, self._missing())  # others need no replacement
        if self.stop is None and not self.has_finished() and not is_saved:
            self._check_nothing_is_due()
        return actions

    def _check_nothing_is_due(self):
        members = self.members()
        slow = self.background.keys() & (members | self._needed())
        require(not slow, "who is needed has the share of a member", slow)
        require(members, "a job without members is over", self.ranks)
        if members <= self.requests.keys() - self.killed:
            require(not self._is_enough(members), "a round closes at once", members)
            require(self._can_become_enough(members), "no vain wait", members)
            require(not self.must_save(), "a preempted job ends at once", members)
        if self.preempted:
            return
        if not self.preempting:
            require(not self.useless(), "useless newcomers end", self.useless())
        is_asked = self.generation in self.asked
        if (self.leaving() or self.preempting or is_asked) and not self.is_open():
            require(is_asked, "a member that wants to leave is heard", self.leaving())
            if self.steps.keys() >= members:
                require(self.generation in self.ends, "the last step is known", members)
            return
        if self.preempting:
            return
        if self.ready and self.has_room() and not self.is_open():
            is_known = self.generation in self.announced
            require(is_known, "newcomers are announced", self.ready)
        is_useful = self.wanted >= self.settings["min_size"]
        places = self.target() + self._most_spare()
        if is_useful and len(self.live - self.unwanted) < places:
            require(not self._starts_left(), "lost members are replaced", self.live)

    def _check_answer(self, action, now_s):
        require(self.stop is None, "no Answer after Stop", action)

    def _check_start(self, action, now_s):
        require(self.stop is None, "no Start after Stop", action)
        is_ending = self.preempting or self.preempted
        require(not is_ending, "a preempted job starts nothing", action)
        expected = max(self.settings["max_size"], 2) + self.started
        require(action.member == expected, "numbers increase by one", action)
        starts_with_ranks = self.spares_left > 0
        if starts_with_ranks:
            self.spares_left -= 1
        else:
            require(self._starts_left() > 0, "limits of replacements", action)
            if not self._free_starts():
                self.lost -= 1
                self.restarts += 1
        there = self.live - self.unwanted
        is_free = len(there) < self.target() + self._most_spare()
        require(is_free, "only lost members are replaced", action)
        self.started += 1
        self.live.add(action.member)
        is_needed = starts_with_ranks or action.member in self._needed()
        require(is_needed != action.in_background, "spares give way", action)
        if action.in_background:
            self.background[action.member] = now_s + BACKGROUND_LIMIT_S
        self.deadline_s[action.member] = now_s + self.settings["start_limit_s"]

    def _check_prioritize(self, action, now_s):
        is_needed = action.member in self.members() | self._needed()
        end_s = self.background.pop(action.member, float("inf"))
        holds = end_s < float("inf") and (is_needed or now_s >= end_s)
        require(holds, "a newcomer in the background is needed", action)

    def _check_kill(self, action, now_s):
        member = action.member
        require(member in self.live - self.killed, "live members are killed", action)
        is_silent = member in self.members() and member not in self.requests
        is_late = self.opened_s is not None and (
            now_s >= self.opened_s + self.settings["round_limit_s"]
        )
        reasons = (
            is_silent and member in self.named,
            is_silent and is_late,
            self.stopped_now == member and self.is_open(),
            now_s >= self.deadline_s.get(member, float("inf")),
            member not in self.ranks and self.has_finished(),
            now_s >= self.leave_by_s.get(member, float("inf")),
            member not in self.ranks and self.must_save(),
        )
        if "removed its slot" in action.reason:
            holds = member in self.misplaced()
            require(holds, "newcomers on removed slots are killed", action)
            self.shed.add(member)
        elif "no longer needed" in action.reason:
            require(member in self.useless(), "useless newcomers are killed", action)
            self.shed.add(member)
        else:
            require(any(reasons), "there is a reason to kill a process", action)
        self.killed.add(member)
        self.ready.pop(member, None)

    def _check_refuse(self, action, now_s):
        member = action.member
        newcomer = self.ready.pop(member, None)
        is_allowed = self.stop is not None or member in self.refused
        if not is_allowed and member not in self.ranks:
            program = self.world.program_of(member)
            if newcomer is not None:
                program = newcomer.program
            is_allowed = self.program and program and program != self.program
        require(is_allowed, "only a different program is refused", action)
        if member not in self.refused:
            self.deadline_s[member] = now_s + self.settings["start_limit_s"]
        self.refused.add(member)

    def _check_dismiss(self, action, now_s):
        member = action.member
        require(
            member in self.leaving(), "only who wants to leave is dismissed", action
        )
        if member in self.leave_by_s:
            require(self.world.wants_to_leave(member), "it wants to leave", action)
        is_over = self.world.is_gone(member)
        is_over = is_over or self.world.is_asking(member, self.generation)
        require(is_over, "no dismissed member runs the old generation", member)
        require(not self.must_save(), "a preempted job dismisses nobody", action)
        waiting = self.requests.keys() - self.killed
        require(self.members() <= waiting, "a complete round", action)
        staying = self.members() - self.leaving()
        newest = max(self.requests[one].committed for one in staying)
        own = self.requests[member].committed
        require(newest >= own, "others have the state of who leaves", action)
        if member in self.leave_by_s and not self.settings["max_restarts"]:
            self.lost += 1
        self.leave_by_s.setdefault(member, now_s + self.settings["leave_limit_s"])
        self.dismissed.add(member)

    def _check_askstep(self, action, now_s):
        is_new = action.generation == self.generation not in self.asked
        require(is_new, "members are asked for their steps once", action)
        is_due = self.leaving() or self.preempting
        require(is_due and not self.is_open(), "somebody wants to leave", action)
        self.asked.add(action.generation)
        self.steps = {}

    def _check_endat(self, action, now_s):
        is_new = action.generation == self.generation not in self.ends
        require(is_new, "a generation has one last step", action)
        members = self.members()
        require(members <= self.steps.keys(), "all have answered", action, self.steps)
        most = max(self.steps[member] for member in members)
        require(action.committed == most + 1, "nobody is beyond the last step", action)
        self.ends[action.generation] = action.committed

    def _check_announce(self, action, now_s):
        is_new = action.generation == self.generation not in self.announced
        require(is_new, "newcomers are announced once in a generation", action)
        is_due = self.ready and self.has_room() and not self.is_open()
        require(is_due, "newcomers are announced when they are ready", action)
        is_ending = self.leaving() or self.preempting or self.generation in self.asked
        require(not is_ending, "no step is lost to newcomers at a handover", action)
        self.announced.add(action.generation)

    def _check_fail(self, action, now_s):
        is_right = action.generation == self.generation
        is_right &= self.ranks.get(action.member) == action.rank
        is_right &= action.member not in self.live
        require(is_right, "only the end of a member is reported", action)

    def _check_stop(self, action, now_s):
        require(self.stop is None, "Stop is given once", action)
        self.stop = action.reason
        members = self.members()
        if "of generation" in action.reason:
            holds = not members and self.ranks.keys() & self.failed
            is_partly = "have finished" in action.reason
            holds = holds and is_partly == bool(self.ranks.keys() & self.finished)
            holds = holds and not self.preempted
        else:
            waiting = self.requests.keys() - self.killed
            require(members and members <= waiting, "a complete round", action)
            holds = self._is_hopeless(action.reason, members)
        require(holds, "the reason of Stop holds", action)

    def _is_hopeless(self, reason, members):
        if "--min-np" in reason:
            return not self._can_become_enough(members)
        if "repeat" in reason:
            return self._rounds_without_step(members) >= MOST_ROUNDS
        if "not received" in reason:
            return all(self.requests[member].committed < 0 for member in members)
        return False

    def _check_generation(self, answers, now_s):
        """Checks the generation that these answers form."""
        self._check_fencing()
        new = {answer.member: answer.rank for answer in answers}
        size = len(new)
        require(len(answers) == size, "one Answer for each member", answers)
        numbers = {answer.generation for answer in answers}
        require(numbers == {self.generation + 1}, "generations increase", answers)
        require({a.size for a in answers} == {size}, "one size", answers)
        require(sorted(new.values()) == [*range(size)], "each rank once", answers)
        is_last = {answer.is_last for answer in answers}
        require(is_last == {self.must_save()}, "who saves, and who goes on", answers)
        members = self.members()
        if self.must_save():
            self.preempted = True
            self.ready = {}
            limit_s = now_s + self.settings["leave_limit_s"]
            for member in members:
                self.leave_by_s.setdefault(member, limit_s)
        else:
            most = max(self.wanted, len(members) if self.leaving() else 0)
            most = max(most, len(members) + max(0, self._openings(members)))
            fits = self.settings["min_size"] <= size <= most
            require(fits, "the size is between min_size and the wanted size", size)
            newest = max(self.requests[member].committed for member in members)
            for one in self.leaving():
                others = [m for m in members if m not in self.leaving()]
                has_state = any(self.requests[m].committed == newest for m in others)
                require(not has_state, "who can leave is dismissed", one)
        joined = new.keys() - self.ranks.keys()
        require(members == new.keys() - joined, "every live member takes part", new)
        require(members <= self.requests.keys(), "all members have asked", new)
        room = max(0, self._openings(members))
        first = {*[*self.ready][:room]}
        require(joined == first, "the first that are ready join", new, self.ready)
        require(not new.keys() & self.killed, "no killed member takes part", new)
        differing = [one for one in joined if self._differs(self.ready[one])]
        require(not differing, "all members have one program", differing)
        moved = [m for m in members if new[m] != self.ranks[m] < size and new[m] != 0]
        require(not moved, "members keep their ranks", moved)
        leads = not members or min(new, key=lambda m: new[m]) in members
        require(leads, "rank 0 is no newcomer", new)
        best = max((self.requests[member].committed for member in members), default=-1)
        floor = self.world.floor()
        require(best >= max(floor, 0), "no step that all had is lost", best, floor)
        rounds = self._rounds_without_step(members)
        is_endless = rounds >= MOST_ROUNDS and not self.preempted
        require(not is_endless, "no endless repetition", rounds)
        if not self.ranks.keys() <= self.live | self.dismissed:
            self.without_step = rounds
            self.best_at_failure = max(self.best_at_failure, best)
        self.generation += 1
        self.sizes.append(size)
        self.ranks, self.requests = new, {}
        self.ready = {m: own for m, own in self.ready.items() if m not in new}
        self.named, self.opened_s = set(), None
        self.steps = {}

    def _check_fencing(self):
        """Checks that no process can still run steps of the generation that is over."""
        for member in self.ranks.keys() - self.dismissed:
            is_over = self.world.is_gone(member) or self.world.is_asking(
                member, self.generation
            )
            require(is_over, "no member runs the old generation", member)
