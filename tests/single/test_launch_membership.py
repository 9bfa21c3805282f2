"""Who belongs to an elastic job, by the rules of `tfdist.launch.membership`. Pure."""

import pytest

from tfdist.launch.membership import Membership
from tfdist.launch.membership_actions import (
    Announce,
    Answer,
    AskStep,
    Dismiss,
    EndAt,
    Fail,
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
    REPLACE_EVERY_S,
    ROUND_LIMIT_S,
    START_FAILURES,
    START_LIMIT_S,
    assign_ranks,
)


class Job:
    """A membership, in the words of the tests. Every event returns its actions."""

    def __init__(self, size=4, *, min_size=1, max_restarts=10, **limits):
        self.membership = Membership(
            size, min_size=min_size, max_restarts=max_restarts, **limits
        )
        self.now_s = 0.0

    def ask(self, *members, committed=10, failed=(), program="", generation=None):
        """Members ask for their places in the next generation, one after another."""
        if generation is None:
            generation = self.membership.generation
        actions = []
        for member in members:
            request = Request(member, generation, committed, failed, program)
            actions += self.membership.request(request, self.now_s)
        return actions

    def ready(self, *members, program=""):
        return self.ask(*members, committed=-1, program=program, generation=0)

    def lose(self, *members):
        return self._end(members, failed=True)

    def finish(self, *members):
        return self._end(members, failed=False)

    def leave(self, *members):
        actions = []
        for member in members:
            actions += self.membership.leave(member, self.now_s)
        return actions

    def replace(self, member):
        return self.membership.replace(member, self.now_s)

    def kept(self, member):
        return self.membership.reason_to_keep(member, self.now_s)

    def at_step(self, committed, *members):
        generation, actions = self.membership.generation, []
        for member in members:
            actions += self.membership.at_step(
                member, generation, committed, self.now_s
            )
        return actions

    def resize(self, slots, unwanted=()):
        return self.membership.resize(slots, self.now_s, unwanted)

    def preempt(self):
        return self.membership.preempt(self.now_s)

    def _end(self, members, failed):
        actions = []
        for member in members:
            actions += self.membership.ended(member, failed=failed, now_s=self.now_s)
        return actions

    def stopped(self, member):
        return self.membership.stopped(member, self.now_s)

    def after(self, seconds):
        """Some time passes; then the membership is polled."""
        self.now_s += seconds
        return self.membership.poll(self.now_s)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def places(actions):
    """Member → rank in the generation that is formed; {} if none is."""
    return {action.member: action.rank for action in of(Answer, actions)}


def spare(member):
    """The start of a newcomer for which no place is vacant."""
    return Start(member, in_background=True)


def members(actions):
    return [action.member for action in actions]


# ---- ranks ----


def test_members_keep_their_ranks_and_holes_are_filled_from_above():
    assert assign_ranks({0: 0, 1: 1}, []) == {0: 0, 1: 1}
    assert assign_ranks({0: 0, 2: 2, 3: 3}, []) == {0: 0, 3: 1, 2: 2}
    # Two ranks are too high: they fill the holes in the order of their old ranks.
    assert assign_ranks({7: 5, 8: 4, 9: 1}, []) == {8: 0, 9: 1, 7: 2}


def test_newcomers_get_what_is_left_in_the_order_of_their_readiness():
    assert assign_ranks({1: 1}, [9, 8]) == {1: 0, 9: 1, 8: 2}
    assert assign_ranks({3: 3}, [9, 8]) == {3: 0, 9: 1, 8: 2}


# ---- rounds ----


def test_a_round_closes_when_every_live_member_has_asked():
    job = Job(3)
    assert job.lose(1) == [Fail(1, 1, 1), Start(3)]
    assert job.ask(0) == []
    assert job.ask(2) == [Answer(0, 2, 0, 2), Answer(2, 2, 1, 2)]
    assert job.membership.generation == 2
    assert job.membership.ranks == {0: 0, 2: 1}


def test_a_round_closes_when_the_last_silent_member_ends():
    job = Job(3)
    job.ask(0, 2)
    assert job.lose(1)[:2] == [Answer(0, 2, 0, 2), Answer(2, 2, 1, 2)]


def test_a_generation_can_end_again_while_it_connects():
    job = Job(4)
    job.lose(3)
    job.ask(0, 1, 2)
    assert Fail(2, 2, 2) in job.lose(2)
    assert places(job.ask(0, 1)) == {0: 0, 1: 1}
    assert job.membership.generation == 3


def test_who_is_named_as_failed_and_does_not_ask_in_time_is_killed_once():
    job = Job(4)
    assert job.ask(0, failed=(2,)) == []
    assert job.after(NAMED_LIMIT_S - 0.1) == []
    assert job.ask(1, 3, failed=(2,)) == []  # the time is that of the first request
    [kill] = job.after(0.1)
    assert isinstance(kill, Kill) and kill.member == 2
    assert "reported 5 s ago that rank 2 had failed" in kill.reason
    assert job.after(1.0) == []
    assert places(job.lose(2)) == {0: 0, 1: 1, 3: 2}


def test_who_is_named_as_failed_and_asks_in_time_goes_on():
    job = Job(3)
    job.ask(0, 2, failed=(1,))
    job.after(NAMED_LIMIT_S - 0.1)
    assert places(job.ask(1)) == {0: 0, 1: 1, 2: 2}
    assert job.after(NAMED_LIMIT_S) == []


def test_ranks_are_named_not_members():
    job = Job(3)
    job.lose(0)
    job.ask(1, 2)
    assert job.membership.ranks == {2: 0, 1: 1}
    job.ask(1, failed=(0,))
    assert members(job.after(NAMED_LIMIT_S)) == [2]


def test_who_has_asked_is_not_killed_when_another_one_names_it():
    job = Job(2)
    assert job.ask(0) == []
    job.ask(1, failed=(0,))
    assert of(Kill, job.after(NAMED_LIMIT_S)) == []
    assert job.membership.generation == 2


def test_a_killed_member_is_waited_for_until_it_has_ended():
    job = Job(4)
    job.ask(0, 1, failed=(2,))
    job.after(NAMED_LIMIT_S)
    assert job.ask(2, failed=(3,)) == []  # too late: nobody listens to it any more
    assert job.ask(3) == []
    assert job.membership.generation == 1
    assert places(job.lose(2)) == {0: 0, 1: 1, 3: 2}


def test_a_stopped_member_is_killed_while_others_wait():
    job = Job(3)
    assert job.stopped(2) == []  # nobody waits: it may continue
    job.ask(0)
    assert members(of(Kill, job.stopped(2))) == [2]
    assert job.stopped(2) == []
    # A stopped member that has asked would not connect.
    assert members(of(Kill, job.stopped(0))) == [0]
    assert job.ask(1) == []
    job.lose(2)
    assert places(job.lose(0)) == {1: 0}


def test_who_does_not_ask_in_time_is_killed():
    job = Job(3)
    assert job.after(1000.0) == []
    job.ask(0)
    assert job.after(ROUND_LIMIT_S - 1) == []
    job.ask(1)
    [kill] = job.after(1)
    assert isinstance(kill, Kill) and kill.member == 2
    assert "did not reach its commit within 300 s" in kill.reason
    assert job.after(1) == []


def test_the_time_of_a_round_begins_with_its_first_request():
    job = Job(3, round_limit_s=10.0)
    job.ask(0)
    job.after(9)
    job.lose(0)  # the only one that has asked: the round is over
    job.ask(1)
    assert job.after(9) == []
    assert members(job.after(1)) == [2]


def test_repeated_and_late_requests_are_ignored():
    job = Job(3)
    assert job.ask(0, 0, 1, 1) == []
    assert places(job.ask(2)) == {0: 0, 1: 1, 2: 2}
    assert job.ask(0, 1, 2, generation=1) == []  # late copies
    assert job.ask(0, generation=0) == []
    assert not of(Answer, job.ask(0, 1))  # the round of generation 2 has its own count


def test_requests_of_the_unknown_and_of_the_dead_are_ignored():
    job = Job(2)
    assert job.ask(77) == []
    job.lose(1)
    assert job.ask(1) == []
    assert job.membership.generation == 1


def test_a_request_for_a_generation_without_a_place_in_it_is_refused():
    job = Job(2)
    [refusal] = job.ask(0, generation=5)
    assert isinstance(refusal, Refuse)
    assert "no place in that generation" in refusal.reason
    job.lose(1)  # member 2 is started
    assert members(of(Refuse, job.ask(2, generation=1))) == [2]


# ---- enough members ----


def test_too_few_members_wait_for_the_replacement():
    job = Job(3, min_size=3)
    assert Start(3) in job.lose(1)
    assert job.ask(0, 2) == []
    assert places(job.ready(3)) == {0: 0, 3: 1, 2: 2}


def test_too_few_members_wait_for_the_next_replacement():
    job = Job(2, min_size=2)
    job.lose(1)
    job.ask(0)
    assert job.lose(2) == [Start(3)]
    assert places(job.ready(3)) == {0: 0, 3: 1}


def test_the_job_stops_when_too_few_members_are_left_for_good():
    job = Job(3, min_size=3, max_restarts=0)
    assert job.lose(1) == [Fail(1, 1, 1)]
    job.ask(0)
    [stop, *refusals] = job.ask(2)
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("2 ranks are left, but --min-np is 3, and --max-res")
    assert "--max-restarts 0 allows no replacements" in stop.reason
    assert "Start the job again" in stop.reason
    assert refusals == [Refuse(0, stop.reason), Refuse(2, stop.reason)]
    assert job.membership.stop_reason == stop.reason


def test_it_stops_at_once_when_those_that_prepare_are_not_enough():
    job = Job(4, min_size=4, max_restarts=1)
    assert members(of(Start, job.lose(2, 3))) == [4]
    assert len(of(Stop, job.ask(0, 1))) == 1


def test_it_stops_when_finished_members_leave_too_few():
    job = Job(4, min_size=3)
    assert of(Start, job.finish(0, 1)) == []
    assert of(Start, job.lose(2)) == []  # it would be of no use
    [stop] = of(Stop, job.ask(3))
    assert "the other ranks have finished with exit code 0" in stop.reason


# ---- spares ----


def test_a_spare_takes_the_place_of_a_lost_member_at_once():
    job = Job(3, spares=1)
    assert job.membership.begin(0.0) == [Start(3)]
    assert job.ready(3) == []  # the job has all its members: nobody is told
    assert job.lose(1) == [
        *(Fail(1, 1, 1), Announce(1)),
        spare(4),  # the next one is not needed yet
    ]
    assert places(job.ask(0, 2)) == {0: 0, 3: 1, 2: 2}
    assert job.membership.restarts == 1


def test_a_spare_that_prepares_itself_is_not_in_the_background_once_it_is_needed():
    job = Job(2, spares=2)
    assert job.membership.begin(0.0) == [Start(2), Start(3)]
    assert [*job.lose(2), *job.lose(3)] == [spare(4), spare(5)]
    actions = job.lose(0)
    assert actions[-2:] == [Prioritize(4), spare(6)]
    assert job.ready(5)[-1] == Prioritize(5)  # it joins before member 4
    assert places(job.ask(1)) == {1: 0, 5: 1}


def test_a_spare_that_prepares_itself_for_long_is_not_in_the_background_any_more():
    """On busy CPUs, it might not be ready in time."""
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    assert job.lose(2) == [spare(3)]
    assert job.after(BACKGROUND_LIMIT_S - 1.0) == []
    assert job.after(1.0) == [Prioritize(3)]
    assert job.after(1.0) == []


def test_a_spare_that_has_ended_is_not_in_the_background_any_more():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    assert [*job.lose(2), *job.lose(3)] == [spare(3), spare(4)]
    assert job.after(BACKGROUND_LIMIT_S) == [Prioritize(4)]


def test_without_a_spare_a_replacement_is_needed_at_once():
    job = Job(2)
    assert of(Start, job.lose(0)) == [Start(2)]


def test_further_spares_wait_in_the_order_of_their_readiness():
    job = Job(2, spares=2)
    assert members(job.membership.begin(0.0)) == [2, 3]
    job.ready(3, 2)
    job.lose(1)
    assert places(job.ask(0)) == {0: 0, 3: 1}
    job.lose(0)
    assert places(job.ask(3)) == {3: 0, 2: 1}


def test_a_spare_that_is_late_joins_when_it_is_ready():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    job.lose(1)
    assert places(job.ask(0)) == {0: 0}
    assert job.ready(2) == [Announce(2)]


def test_spares_end_with_the_job():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    job.ready(2)
    assert job.finish(0, 1)[-1] == Kill(2, "the job has finished")


@pytest.mark.parametrize("min_size", [0, 3])
def test_min_size_lies_between_one_and_size(min_size):
    with pytest.raises(ValueError, match="1 <= min_size <= size"):
        Membership(2, min_size=min_size, max_restarts=0)


def test_max_size_is_at_least_size():
    with pytest.raises(ValueError, match="max_size >= size, got max_size 1, size 2"):
        Membership(2, min_size=1, max_restarts=0, max_size=1)


@pytest.mark.parametrize("name", ["max_restarts", "spares"])
def test_numbers_of_processes_are_not_negative(name):
    settings = {"max_restarts": 0, name: -1}
    with pytest.raises(ValueError, match=f"{name} -1"):
        Membership(2, min_size=1, **settings)


# ---- replacements ----


def test_each_lost_member_is_replaced_under_a_new_number():
    job = Job(4, max_restarts=3)
    assert members(of(Start, job.lose(1, 2))) == [4, 5]
    assert job.lose(4) == [Start(6)]
    assert job.lose(5) == []  # three were started
    assert job.membership.restarts == 3
    assert job.membership.live == {0, 3, 6}


def test_a_member_that_has_finished_is_not_replaced():
    job = Job(3)
    assert job.finish(1) == [Fail(1, 1, 1)]
    assert members(of(Start, job.lose(2))) == [3]
    job.ready(3)
    assert places(job.ask(0)) == {0: 0, 3: 1}  # and the job has become smaller


def test_replacements_end_when_several_in_a_row_did_not_become_ready():
    job = Job(3)
    job.lose(2)
    assert job.lose(3) == [Start(4)]
    assert job.finish(4) == [Start(5)]  # exit code 0 is as early
    assert job.lose(5) == []
    assert places(job.ask(0, 1)) == {0: 0, 1: 1}  # it goes on with fewer


def test_too_few_members_and_failed_replacements_stop_the_job():
    job = Job(2, min_size=2)
    job.lose(1)
    job.ask(0)
    job.lose(2, 3)
    [stop] = of(Stop, job.lose(4))
    assert f"{START_FAILURES} replacements in a row ended before" in stop.reason


def test_a_replacement_that_becomes_ready_ends_the_series_of_failures():
    job = Job(3)
    job.lose(1, 2)  # 3 and 4 are started
    assert job.lose(3) == [Start(5)]
    assert job.lose(5) == [Start(6)]
    job.ready(4)
    assert job.lose(6) == [Start(7)]
    assert job.lose(4) == [Start(8)]  # it was ready: no failed start
    assert job.lose(7) == [Start(9)]


def test_a_replacement_that_hangs_is_killed_and_replaced():
    job = Job(2)
    job.lose(1)
    assert job.after(START_LIMIT_S - 1) == []
    [kill] = job.after(1)
    assert kill == Kill(2, "it is not ready 600 s after its start")
    assert job.lose(2) == [Start(3)]
    job.ready(3)
    assert job.after(2 * START_LIMIT_S) == []  # it waits for the others


def test_a_newcomer_that_prepares_may_still_end_the_series_of_failures():
    job = Job(4, min_size=4)
    job.lose(2, 3)  # 4 and 5 are started
    job.ask(0, 1)
    assert members(job.lose(4, 6)) == [6, 7]
    assert job.lose(7) == []
    assert job.ready(5) == [Start(8)]
    assert len(places(job.ready(8))) == 4


# ---- newcomers ----


def test_newcomers_are_announced_once_in_a_generation():
    job = Job(4)
    job.lose(2, 3)
    assert places(job.ask(0, 1)) == {0: 0, 1: 1}
    assert job.ready(4) == [Announce(2)]
    assert job.ready(5) == []
    assert job.ask(0) == []
    assert places(job.ask(1)) == {0: 0, 1: 1, 4: 2, 5: 3}
    job.lose(5)
    assert places(job.ask(0, 1, 4)) == {0: 0, 1: 1, 4: 2}
    assert job.ready(6) == [Announce(4)]


def test_a_newcomer_that_is_ready_in_a_round_takes_part():
    job = Job(3)
    job.lose(2)
    job.ask(0)
    assert job.ready(3) == []
    assert places(job.ask(1)) == {0: 0, 1: 1, 3: 2}


def test_newcomers_are_announced_when_their_round_is_over_without_a_generation():
    job = Job(3)
    job.lose(2)
    job.ask(0)
    job.ready(3)
    assert Announce(1) in job.lose(0)  # the only one that had asked


def test_a_newcomer_of_another_program_is_refused():
    job = Job(2)
    job.lose(1)
    job.ask(0, program="a")
    [refusal] = job.ready(2, program="b")
    assert isinstance(refusal, Refuse)
    assert "the variables in its State" in refusal.reason
    assert "start the whole job again" in refusal.reason
    assert job.ready(2, program="b") == [refusal]
    assert job.lose(2) == [Start(3)]
    assert job.ready(3, program="a") == [Announce(2)]


def test_the_program_of_a_newcomer_is_compared_when_that_of_the_members_is_known():
    job = Job(2)
    assert job.membership.program == ""
    job.lose(1)
    assert job.ready(2, program="b") == [Announce(1)]
    refusal, answer = job.ask(0, program="a")
    assert isinstance(refusal, Refuse) and refusal.member == 2
    assert answer == Answer(0, 2, 0, 1)
    assert job.membership.program == "a"


def test_a_program_that_is_not_known_differs_from_none():
    job = Job(2)
    job.lose(1)
    job.ask(0, program="a")
    assert job.ready(2, program="") == [Announce(2)]
    assert places(job.ask(0, program="")) == {0: 0, 2: 1}
    assert job.membership.program == "a"


def test_a_refused_process_that_does_not_end_is_killed():
    job = Job(2)
    job.lose(1)
    job.ask(0, program="a")
    job.after(START_LIMIT_S / 2)
    job.ready(2, program="b")
    assert job.after(START_LIMIT_S / 2) == []
    job.ready(2, program="b")  # asking again does not help
    assert job.after(START_LIMIT_S / 2) == [
        Kill(2, "it has not ended 600 s after a refusal")
    ]


def test_a_program_is_compared_with_the_latest_of_the_members():
    job = Job(3)
    job.lose(2)
    job.ask(0, program="a")
    assert places(job.ask(1, program="b")) == {0: 0, 1: 1}  # they have run together
    assert job.ready(3, program="b") == [Announce(2)]


def test_a_refused_newcomer_is_not_waited_for():
    job = Job(2, min_size=2, max_restarts=1)
    job.lose(1)
    job.ask(0, program="a")
    assert [type(action) for action in job.ready(2, program="b")] == [
        *(Refuse, Stop, Refuse)
    ]


def test_a_newcomer_that_is_stopped_when_it_was_ready_does_not_take_part():
    job = Job(3, min_size=2)
    job.lose(1, 2)
    job.ask(0)
    assert places(job.ready(3)) == {0: 0, 3: 1}
    job.ask(0)
    job.ready(4)
    assert members(of(Kill, job.stopped(4))) == [4]
    assert places(job.ask(3)) == {0: 0, 3: 1}


def test_a_stopped_newcomer_is_killed_while_members_wait():
    job = Job(2, min_size=2, max_restarts=1)
    job.lose(1)
    assert job.stopped(2) == []
    job.ask(0)
    kill, stop, _ = job.stopped(2)
    assert kill.member == 2
    assert isinstance(stop, Stop)  # no other can be started


# ---- news of a lost member ----


def test_those_that_may_be_connecting_are_told_that_a_member_has_ended():
    job = Job(3)
    assert Fail(1, 2, 2) in job.lose(2)
    job.ask(0)
    assert Fail(1, 0, 0) in job.lose(0)
    assert of(Fail, job.lose(3)) == []  # a newcomer connects with nobody


def test_nobody_is_told_when_all_have_left_the_generation():
    job = Job(3, min_size=3)
    job.lose(2)
    job.ask(0, 1)
    assert of(Fail, job.lose(1)) == []


# ---- no progress ----


def fail_at(job, step):
    """The member of the highest rank dies; the others ask. Returns the actions."""
    *rest, lost = job.membership.ranks
    actions = job.lose(lost)
    return [*actions, *job.ask(*rest, committed=step)]


def test_the_job_stops_when_failures_repeat_without_a_new_step():
    job = Job(8)
    assert places(fail_at(job, 7))  # generation 1 came to step 7
    for _ in range(MOST_ROUNDS - 1):
        assert places(fail_at(job, 7))
    job.ask(*range(4), committed=7)
    actions = job.lose(4)  # now all that live have asked
    [stop] = of(Stop, actions)
    assert not of(Start, actions)
    assert "again and again after commit 7, and no" in stop.reason
    assert "the same failure seems to repeat" in stop.reason
    assert not places(actions)


def test_a_new_step_ends_the_series_of_failures():
    job = Job(8)
    for step in (7, 7, 7, 8, 8, 8):
        assert places(fail_at(job, step))
    assert of(Stop, fail_at(job, 8))


def test_a_step_that_was_lost_with_its_member_is_not_new_when_it_is_repeated():
    job = Job(8)
    for step in (8, 7, 8):
        assert places(fail_at(job, step))
    assert of(Stop, fail_at(job, 8))


def test_generations_that_only_grow_are_not_counted_and_end_no_series():
    job = Job(8)
    for _ in range(MOST_ROUNDS):
        newcomer = members(of(Start, fail_at(job, 7)))[0]
        job.ready(newcomer)
        assert len(places(job.ask(*range(7), committed=7))) == 8
    assert of(Stop, fail_at(job, 7))


# ---- the end ----


def test_newcomers_are_killed_when_the_job_has_finished():
    job = Job(3)
    job.lose(2)
    job.ask(0, 1)
    job.ready(3)
    job.finish(0)
    assert not job.membership.finished
    assert job.finish(1) == [Kill(3, "the job has finished")]
    assert job.membership.finished
    assert job.lose(3) == []
    assert job.membership.stop_reason == ""


def test_the_job_stops_when_all_have_ended_and_one_failed():
    job = Job(3)
    job.lose(1)
    job.ready(3)
    job.finish(0)
    [stop, refusal] = job.lose(2)
    assert "ranks 1 and 2 of generation 1 failed, and the other ranks" in str(stop)
    assert refusal == Refuse(3, stop.reason)
    assert not job.membership.finished


def test_failures_of_earlier_generations_do_not_matter_in_the_end():
    job = Job(3)
    job.lose(1)
    job.ask(0, 2)
    job.finish(0, 2)
    assert job.membership.finished


def test_newcomers_alone_cannot_continue_the_training():
    job = Job(2)
    job.lose(1)
    job.ready(2)
    assert places(job.ask(0)) == {0: 0, 2: 1}
    job.lose(0)  # before member 2 had received the state
    [stop, refusal] = job.ask(2, committed=-1)
    assert isinstance(stop, Stop)
    assert "had the training state exited before generation 2" in stop.reason
    assert refusal == Refuse(2, stop.reason)


def test_after_a_stop_nothing_is_started_and_requests_are_refused():
    job = Job(3, min_size=3, max_restarts=1)
    job.lose(1, 2)
    [stop] = of(Stop, job.ask(0))
    assert job.ready(3) == [Refuse(3, stop.reason)]
    assert job.ask(0) == [Refuse(0, stop.reason)]
    assert job.lose(0, 3) == []
    assert job.after(10_000.0) == []
    assert job.membership.restarts == 1


def test_the_largest_committed_step_is_known():
    job = Job(2)
    assert job.membership.committed == -1
    job.ask(0, committed=12)
    job.ask(1, committed=11)
    assert job.membership.committed == 12


# ---- handovers ----


def test_a_member_leaves_after_a_step_that_all_have_committed():
    job = Job(3)
    assert job.leave(1) == [AskStep(1)]
    assert job.at_step(10, 0, 1) == []
    assert job.at_step(11, 2) == [EndAt(1, 12)]
    assert job.ask(0, 1, committed=12) == []
    actions = job.ask(2, committed=12)
    assert actions == [Dismiss(1), Answer(0, 2, 0, 2), Answer(2, 2, 1, 2)]
    assert job.lose(1) == [Start(3)]  # when its device and processors are free
    assert job.membership.restarts == 0


def test_a_spare_takes_the_place_of_a_member_that_leaves():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    job.ready(2)
    assert job.leave(0) == [AskStep(1)]
    assert places(job.ask(0, 1)) == {1: 0, 2: 1}


def test_with_no_restarts_nobody_replaces_a_member_that_leaves():
    job = Job(3, max_restarts=0)
    job.leave(1)
    job.ask(0, 1, 2)
    assert job.lose(1) == []


def test_the_members_save_if_too_few_would_be_left():
    job = Job(3, min_size=2, max_restarts=0)
    job.leave(1, 2)
    actions = job.ask(0, 1, 2)
    assert places(actions) == {0: 0, 1: 1, 2: 2}
    assert all(action.is_last for action in actions)
    assert job.membership.preempted
    assert of(Start, job.lose(0)) + of(Stop, job.lose(1, 2)) == []


def test_the_job_waits_for_the_replacement_of_a_member_that_has_left():
    job = Job(2, min_size=2)
    job.leave(1)
    assert job.ask(0, 1) == [Dismiss(1)]
    assert job.lose(1) == [Start(2)]
    assert places(job.ready(2)) == {0: 0, 2: 1}


def test_all_members_save_if_all_leave():
    job = Job(2)
    job.leave(0, 1)
    assert [one.is_last for one in of(Answer, job.ask(0, 1))] == [True, True]


def test_a_preempted_job_saves_and_starts_nothing():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    assert job.preempt() == [AskStep(1)]
    actions = job.ask(0, 1)
    assert members(of(Kill, actions)) == [2]
    assert places(actions) == {0: 0, 1: 1}
    # A member that is lost now is not replaced: the other one saves.
    assert job.lose(1) == [Fail(2, 1, 1)]
    assert job.ask(0) == [Answer(0, 3, 0, 1, is_last=True)]


def test_a_preempted_job_does_not_wait_for_replacements():
    job = Job(2, min_size=2)
    job.lose(1)
    assert job.ask(0) == []
    assert of(Answer, job.preempt()) == [Answer(0, 2, 0, 1, is_last=True)]


def test_a_member_gives_its_newer_state_before_it_leaves():
    job = Job(3)
    job.leave(1)
    job.lose(2)
    job.ask(0, committed=10)
    actions = job.ask(1, committed=11)
    assert places(actions) == {0: 0, 1: 1}
    assert of(AskStep, actions) == [AskStep(2)]
    assert Dismiss(1) in job.ask(0, 1, committed=12)


def test_a_member_that_does_not_leave_in_time_is_killed():
    job = Job(2, leave_limit_s=25.0)
    job.leave(1)
    assert job.after(24.0) == []
    assert members(job.after(1.0)) == [1]


def test_newcomers_join_in_the_round_in_which_a_member_leaves():
    """They do not end the generation themselves, which would undo a step."""
    job = Job(3)
    job.lose(2)
    job.ask(0, 1)
    job.leave(1)
    assert job.ready(3) == []
    assert places(job.ask(0, 1)) == {0: 0, 3: 1}


# ---- slow members ----


def test_a_slow_member_leaves_when_its_replacement_is_ready():
    job = Job(2, min_size=2, max_restarts=1)
    assert job.replace(1) == [spare(2)]
    assert job.ready(2) == [AskStep(1), Prioritize(2)]
    assert job.at_step(10, 0, 1) == [EndAt(1, 11)]
    job.ask(0, committed=11)
    assert job.ask(1, committed=11) == [
        *(Dismiss(1), Answer(0, 2, 0, 2), Answer(2, 2, 1, 2)),
    ]
    assert job.lose(1) == [] and job.membership.restarts == 0


def test_a_spare_takes_the_place_of_a_slow_member_at_once():
    job = Job(2, spares=1)
    job.membership.begin(0.0)
    job.ready(2)
    assert job.replace(0) == [AskStep(1)]
    assert places(job.ask(0, 1)) == {1: 0, 2: 1}
    assert job.lose(0) == [spare(3)]  # the next spare
    assert job.membership.restarts == 0


def test_at_most_one_slow_member_is_replaced_in_some_minutes():
    job = Job(3)
    job.replace(1)
    assert job.kept(1) == "its replacement is being started"
    assert "was begun less than 10 minutes ago" in job.kept(2)
    assert job.replace(2) == []
    job.ready(3)
    job.ask(0, 1, 2)
    job.lose(1)
    job.after(REPLACE_EVERY_S - 1.0)
    assert job.replace(3) == []  # the replacement is slow too
    job.after(1.0)
    assert job.replace(3) == [spare(4)]


def test_a_slow_member_stays_if_nothing_can_take_its_place():
    job = Job(2, max_restarts=0)
    assert job.kept(1) == "--max-restarts 0 allows no replacements"
    assert job.replace(1) == []
    job = Job(2)
    job.replace(1)
    for member in range(2, 2 + START_FAILURES):
        job.lose(member)
    job.after(REPLACE_EVERY_S)
    assert "ended before they joined" in job.kept(1)
    assert job.leave(1) == [AskStep(1)]  # after SIGTERM it leaves all the same


def test_members_that_leave_anyway_are_not_replaced_for_being_slow():
    job = Job(2)
    assert job.kept(7) == job.kept(-1) == "it is already leaving"
    job.leave(1)
    assert job.kept(1) == "it is already leaving"
    job.preempt()
    assert job.kept(0) == "the job is ending"


def test_a_slow_member_that_is_lost_is_replaced_by_the_process_that_was_started():
    job = Job(2)
    job.replace(1)
    assert of(Start, job.lose(1)) == []
    job.ask(0)
    assert job.ready(2) == [Announce(2)]
    assert places(job.ask(0)) == {0: 0, 2: 1}


def test_a_slow_member_has_time_for_its_long_step():
    job = Job(2, leave_limit_s=25.0)
    job.replace(1)
    job.ready(2)
    assert job.after(ROUND_LIMIT_S - 1.0) == []
    [kill] = of(Kill, job.after(1.0))
    assert kill == Kill(1, f"it did not end within {ROUND_LIMIT_S:g} s")


def test_a_slow_member_stays_if_it_is_the_last_one():
    """The job would end, or wait for others, without it."""
    job = Job(2, min_size=1)
    job.replace(1)
    job.ready(2)  # member 1 leaves now
    job.lose(0)
    actions = job.ask(1)
    assert places(actions) == {1: 0, 2: 1} and not of(Dismiss, actions)
    assert not job.membership.preempted


def test_sigterm_counts_more_than_being_slow():
    job = Job(2, leave_limit_s=25.0)
    job.replace(1)
    job.ready(2)
    job.after(10.0)
    job.leave(1)
    assert job.after(24.0) == []
    [kill] = of(Kill, job.after(1.0))
    assert kill == Kill(1, "it did not end within 25 s")


# ---- growing and shrinking ----


def test_newcomers_are_started_when_the_job_may_grow_and_join_when_they_are_ready():
    job = Job(2, max_size=4, max_restarts=0)
    assert job.resize(4) == [Start(4), Start(5)]
    assert job.ready(5) == [Announce(1)]
    assert places(job.ask(0, 1)) == {0: 0, 1: 1, 5: 2}
    assert job.ready(4) == [Announce(2)]
    assert places(job.ask(0, 1, 5)) == {0: 0, 1: 1, 5: 2, 4: 3}
    assert job.membership.restarts == 0


def test_a_size_that_does_not_change_has_no_effect():
    assert Job(2, max_size=4).resize(2) == []


@pytest.mark.parametrize(("wanted", "size"), [(9, 4), (0, 2)])
def test_the_size_stays_between_min_size_and_max_size(wanted, size):
    job = Job(3, min_size=2, max_size=4)
    job.resize(wanted)
    job.ready(4)
    job.ask(0, 1, 2)
    assert len(job.membership.ranks) == size


def test_the_highest_ranks_leave_after_a_step_when_the_job_shrinks():
    job = Job(4)
    assert job.resize(2) == [AskStep(1)]
    assert job.at_step(7, 0, 1, 2) == []
    assert job.at_step(6, 3) == [EndAt(1, 8)]
    actions = job.ask(0, 1, 2, 3, committed=8)
    assert members(of(Dismiss, actions)) == [2, 3]
    assert places(actions) == {0: 0, 1: 1}
    assert job.lose(2) + job.finish(3) == []  # their exit codes mean nothing
    assert not job.membership.finished


def test_a_member_that_got_sigterm_leaves_in_place_of_the_highest_rank():
    job = Job(3)
    job.leave(0)
    job.resize(2)
    assert members(of(Dismiss, job.ask(0, 1, 2))) == [0]
    assert job.lose(0) == []  # nobody takes its place


def test_a_lost_member_is_one_that_need_not_leave():
    job = Job(3)
    assert job.resize(2) == [AskStep(1)]
    assert job.lose(0) == [Fail(1, 0, 0)]
    assert places(job.ask(1, 2)) == {2: 0, 1: 1}


def test_who_was_dismissed_has_to_end():
    job = Job(2, leave_limit_s=25.0)
    job.resize(1)
    assert job.after(1000.0) == []  # a step may take long
    job.ask(0, 1)
    assert job.after(24.0) == []
    assert members(job.after(1.0)) == [1]


def test_members_that_were_asked_get_their_last_step_though_nobody_leaves_any_more():
    """They wait for it."""
    job = Job(2)
    assert job.resize(1) == [AskStep(1)]
    assert job.resize(2) == []
    assert job.at_step(3, 0, 1) == [EndAt(1, 4)]
    assert places(job.ask(0, 1)) == {0: 0, 1: 1}


def test_newcomers_that_are_of_no_use_any_more_are_killed_the_last_ones_first():
    job = Job(1, max_size=4, spares=1)
    job.membership.begin(0.0)  # member 4
    actions = job.resize(4)
    assert members(of(Start, actions)) == [5, 6, 7]
    assert spare(7) in actions
    job.ready(7)
    kill_4, kill_5, kill_6 = job.resize(1)
    assert [kill_4.member, kill_5.member, kill_6.member] == [4, 5, 6]
    assert "the job can only have 1 rank now" in kill_4.reason
    assert job.lose(4, 5, 6) == []
    assert job.membership.start_failures == 0
    job.membership._max_restarts = 0
    assert members(of(Start, job.resize(3))) == [8, 9]  # they are no restarts


def test_a_process_that_is_killed_as_of_no_use_is_waited_for_if_the_job_grows_again():
    job = Job(1, max_size=2)
    job.resize(2)
    job.resize(1)
    assert job.resize(2) == []  # its processors are not free yet
    assert job.lose(2) == [Start(3)]


def test_a_newcomer_of_a_job_that_grows_is_replaced_as_a_lost_member_is():
    job = Job(1, max_size=2, max_restarts=1)
    assert job.resize(2) == [Start(2)]
    assert job.lose(2) == [Start(3)]
    assert job.membership.restarts == 1
    assert job.lose(3) == []


def test_growth_starts_newcomers_again_after_several_have_failed():
    job = Job(1, max_size=3)
    assert members(job.resize(2)) == [3]
    for newcomer in (3, 4, 5):
        actions = job.lose(newcomer)
    assert actions == []
    assert members(job.resize(3)) == [6, 7]


def test_a_loss_that_was_not_replaced_does_not_count_after_the_job_has_shrunk():
    job = Job(2, max_size=2, max_restarts=0)
    assert of(Start, job.lose(1)) == []
    job.ask(0)
    assert job.resize(1) == []
    assert job.resize(2) == [Start(2)]


def test_the_size_does_not_change_once_a_member_has_finished():
    job = Job(2, max_size=4)
    job.finish(1)
    assert job.resize(4) == []
    assert job.finish(0) == []
    assert job.membership.finished


def test_a_member_that_has_left_may_end_after_the_job_has_finished():
    job = Job(2, leave_limit_s=25.0)
    job.leave(1)
    job.ask(0, 1)
    assert of(Kill, job.finish(0)) == []
    assert members(job.after(25.0)) == [1]


def test_members_that_finish_before_they_leave_end_the_job():
    job = Job(3)
    job.resize(1)
    job.finish(2, 1)
    assert places(job.ask(0)) == {0: 0}
    job.finish(0)
    assert job.membership.finished


def test_a_preempted_job_does_not_grow():
    job = Job(1, max_size=2)
    job.preempt()
    assert job.resize(2) == []


def test_the_first_newcomer_of_a_job_of_one_rank_has_a_number_above_two_ranks():
    """Its program is shown two ranks, so that it is not rank 0 while it prepares."""
    assert members(Job(1, spares=1).membership.begin(0.0)) == [2]


# ---- members on slots that were removed ----


def test_members_on_removed_slots_leave_before_the_highest_ranks():
    job = Job(4)
    assert job.resize(3, unwanted={1}) == [AskStep(1)]
    assert job.at_step(7, 0, 1, 2, 3) == [EndAt(1, 8)]
    actions = job.ask(0, 1, 2, 3, committed=8)
    assert members(of(Dismiss, actions)) == [1]
    assert places(actions) == {0: 0, 3: 1, 2: 2}
    assert job.lose(1) == [] and job.membership.restarts == 0


def test_they_leave_also_if_the_size_does_not_change_and_others_are_started():
    job = Job(4, max_restarts=0)
    assert job.resize(6, unwanted={0, 3}) == [AskStep(1), Start(4), Start(5)]
    actions = job.ask(0, 1, 2, 3)
    assert members(of(Dismiss, actions)) == [0, 3]
    job.lose(0, 3)
    assert job.ready(4) == [Announce(2)]
    assert places(job.ask(1, 2)) == {2: 0, 1: 1, 4: 2}
    assert job.membership.restarts == 0


def test_they_stay_until_enough_others_are_ready():
    job = Job(2, min_size=2)
    assert job.resize(2, unwanted={0, 1}) == [Start(2), Start(3)]
    assert job.ready(3) == [AskStep(1)]
    actions = job.ask(0, 1)
    assert members(of(Dismiss, actions)) == [1]
    assert places(actions) == {0: 0, 3: 1}
    job.lose(1)
    assert job.ready(2) == [AskStep(2)]
    assert places(job.ask(0, 3)) == {3: 0, 2: 1}
    assert job.lose(0) == [] and job.membership.restarts == 0


def test_the_only_member_gives_its_state_before_it_leaves():
    job = Job(1)
    assert job.resize(1, unwanted={0}) == [Start(2)]
    assert job.ready(2) == [Announce(1)]
    actions = job.ask(0)
    assert places(actions) == {0: 0, 2: 1} and actions[-1] == AskStep(2)
    actions = job.ask(0, 2, committed=11)
    assert members(of(Dismiss, actions)) == [0] and places(actions) == {2: 0}


def test_a_newcomer_that_is_refused_takes_nobodys_place():
    job = Job(2, min_size=2)
    job.resize(2, unwanted={0, 1})
    job.ready(2, program="other")
    actions = job.ask(0, 1, program="mine")
    assert members(of(Refuse, actions)) == [2] and not of(Dismiss, actions)
    assert places(actions) == {0: 0, 1: 1}


def test_a_newcomer_on_a_removed_slot_is_started_elsewhere():
    job = Job(1, max_size=2, max_restarts=0)
    assert job.resize(2) == [Start(2)]
    [kill, start] = job.resize(2, unwanted={2})
    assert kill == Kill(2, "the discovery script has removed its slot")
    assert start == Start(3)
    assert job.ready(2) == []
    assert job.lose(2) == [] and job.membership.start_failures == 0


def test_a_slot_that_is_added_again_keeps_its_member():
    job = Job(3)
    assert job.resize(2, unwanted={1}) == [AskStep(1)]
    assert job.resize(3) == []
    assert job.at_step(3, 0, 1, 2) == [EndAt(1, 4)]
    assert places(job.ask(0, 1, 2)) == {0: 0, 1: 1, 2: 2}


def test_a_member_that_is_lost_on_a_removed_slot_is_no_restart():
    job = Job(2, min_size=1, max_restarts=0)
    job.resize(2, unwanted={0, 1})
    assert job.lose(1) == [Fail(1, 1, 1)]
    job.ready(2, 3)
    assert places(job.ask(0)) == {0: 0, 2: 1}
    assert job.membership.restarts == 0


def test_others_that_get_sigterm_leave_first():
    """A member on a removed slot then stays, if it is needed."""
    job = Job(3, min_size=2, max_restarts=0)
    job.leave(0)
    assert job.resize(2, unwanted={2}) == []
    actions = job.ask(0, 1, 2)
    assert members(of(Dismiss, actions)) == [0]
    assert places(actions) == {2: 0, 1: 1}


def test_the_slots_of_a_lost_host_are_not_made_up_for_on_others():
    """Neither when the script stops listing it."""
    job = Job(2, min_size=2)
    job.membership.set_room(1, job.now_s, [1])
    assert of(Start, job.lose(1)) == []
    assert job.resize(1) == []
    [stop, _] = job.ask(0)
    assert "room for only 1 rank" in stop.reason
    job = Job(3, min_size=2)
    assert job.resize(1) == [AskStep(1)]  # without a lost host, they are kept
    assert members(of(Dismiss, job.ask(0, 1, 2))) == [2]
    job.lose(2)
    assert of(Start, job.lose(1)) == [Start(3)]


def test_a_slow_member_on_a_removed_slot_is_not_replaced_twice():
    job = Job(2, min_size=2)
    assert job.resize(2, unwanted={0, 1}) == [Start(2), Start(3)]
    assert job.kept(1) == "it is already leaving"
    job = Job(2, min_size=2)
    assert job.replace(1) == [spare(2)]
    # The process takes the same place.
    assert job.resize(3, unwanted={1}) == [Prioritize(2)]
    assert job.ready(2) == [AskStep(1)]
    assert members(of(Dismiss, job.ask(0, 1))) == [1]


def test_slots_do_not_change_a_job_that_is_preempted_or_ends():
    job = Job(2)
    job.preempt()
    assert job.resize(2, unwanted={0, 1}) == []
    job = Job(2)
    job.finish(1)
    assert job.resize(1, unwanted={0}) == []


def test_new_slots_start_newcomers_again_after_several_have_failed():
    job = Job(2, min_size=2)
    job.resize(2, unwanted={0})
    for newcomer in (2, 3, 4):
        actions = job.lose(newcomer)
    assert actions == []
    assert job.resize(2, unwanted={0, 1}) == [Start(5), Start(6)]


# ---- slow members of a job that grows or shrinks ----


def test_a_slow_member_leaves_first_when_the_job_shrinks_and_is_not_replaced():
    job = Job(3)
    assert job.replace(0) == [spare(3)]
    kill, ask = job.resize(2)
    assert kill.member == 3 and "no longer needed" in kill.reason
    assert ask == AskStep(1)
    assert job.kept(0) == "it is already leaving"
    actions = job.ask(0, 1, 2)
    assert members(of(Dismiss, actions)) == [0] and places(actions) == {2: 0, 1: 1}
    assert job.lose(0, 3) == [] and job.membership.restarts == 0


def test_a_member_found_slow_while_the_job_shrinks_leaves_for_the_highest_rank():
    job = Job(3)
    job.resize(2)
    assert job.replace(1) == []
    assert members(of(Dismiss, job.ask(0, 1, 2))) == [1]


def test_a_slow_member_waits_again_if_the_job_grows_before_it_has_left():
    job = Job(3)
    job.replace(0)
    job.resize(2)
    job.lose(3)
    assert job.resize(3) == [spare(4)]
    assert job.kept(0) == "its replacement is being started"
    job.ready(4)
    actions = job.ask(0, 1, 2)
    assert members(of(Dismiss, actions)) == [0]
    assert places(actions).keys() == {1, 2, 4}


def test_a_slow_member_that_leaves_is_not_replaced_if_the_job_shrinks_meanwhile():
    job = Job(3)
    job.replace(1)
    job.ready(3)
    [kill] = job.resize(2)
    assert kill.member == 3 and "no longer needed" in kill.reason
    actions = job.ask(0, 1, 2)
    assert members(of(Dismiss, actions)) == [1] and places(actions) == {0: 0, 2: 1}
    assert job.lose(1, 3) == []


def test_the_first_newcomer_of_a_job_that_grows_takes_the_place_of_a_slow_member():
    job = Job(2, max_size=3, max_restarts=1)
    assert job.replace(1) == [spare(3)]
    assert job.resize(3) == [Prioritize(3), spare(4)]
    assert job.ready(4) == [AskStep(1), Prioritize(4)]
    assert len(places(job.ask(0, 1))) == 2
    assert job.ready(3) == [Announce(2)]
    assert len(places(job.ask(0, 4))) == 3
    assert job.lose(1) == [] and job.membership.restarts == 0


def test_a_loss_counts_as_a_restart_while_a_slow_member_is_replaced():
    job = Job(3, max_restarts=1)
    job.replace(1)
    assert job.lose(2) == [Fail(1, 2, 2), Prioritize(3), spare(4)]
    assert job.membership.restarts == 1
    job.ready(3)
    job.ask(0, 1)  # member 1 leaves
    assert job.lose(1) == []
    assert job.lose(4) == []  # --max-restarts 1 allows no more


def test_a_newcomer_that_a_job_needs_to_grow_is_no_replacement_without_restarts():
    job = Job(2, max_size=3, max_restarts=0)
    job.resize(3)
    assert job.kept(1) == "--max-restarts 0 allows no replacements"
    job = Job(2, max_size=3, max_restarts=0, spares=1)
    job.membership.begin(0.0)
    assert job.kept(1) == ""


def test_a_newcomer_ends_if_the_slow_member_stays_in_its_place():
    job = Job(1)
    assert job.replace(0) == [spare(2)]
    [kill] = job.ready(2)
    assert kill.member == 2 and "no longer needed" in kill.reason
    assert job.lose(2) == []


def test_a_slow_member_stays_if_its_replacement_is_refused_in_the_same_round():
    """The job would be preempted, as too few members were left."""
    job = Job(2, min_size=2, max_restarts=0, spares=1)
    job.membership.begin(0.0)
    job.ready(2, program="other")
    assert job.replace(1) == [AskStep(1)]
    actions = job.ask(0, 1, program="mine")
    assert members(of(Refuse, actions)) == [2] and not of(Dismiss, actions)
    assert places(actions) == {0: 0, 1: 1} and not job.membership.preempted
