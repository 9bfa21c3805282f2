"""tfdistrun's part in elastic jobs: messages of the members, and their processes."""

import os
from dataclasses import replace

import pytest

from tfdist.core.rendezvous import renewal
from tfdist.core.rendezvous.store import (
    SLOW,
    answer_key,
    ask_step_key,
    begun_key,
    change_key,
    failure_key,
    leave_key,
    request_key,
)
from tfdist.launch.discovery import DiscoveryError
from tfdist.launch.elastic import ElasticJob
from tfdist.launch.elastic_receiver import Receiver
from tfdist.launch.hosts import Host, slots_of
from tfdist.launch.membership import Membership
from tfdist.launch.membership_actions import AskStep, EndAt
from tfdist.launch.output import complain
from tfdist.launch.slots import Slots


class Processes:
    """Notes what it is asked for."""

    def __init__(self):
        self.killed, self.formed_ranks, self.started = [], [], []
        self.background = set()
        self.stopped_members = set()

    def start(self, member, name, *, in_background):
        self.started.append(name)
        if in_background:
            self.background.add(member)
        self.hosts.slots.take(member, self.job._membership.live - {member})
        self.job.started(int(name.split()[1]), os.getpid())
        return True

    def prioritize(self, member):
        self.background.remove(member)

    def kill(self, member):
        self.killed.append(member)

    def stopped(self):
        return [*self.stopped_members]

    def formed(self, ranks):
        self.formed_ranks.append(dict(ranks))

    def end_job(self):
        raise AssertionError("the job could go on")


class Hosts:
    """The hosts that the test lists; they are ready at once."""

    def __init__(self, *listed):
        self.names, self.lost = [], []
        self.slots = Slots(self._listed(listed), least=1)

    def _listed(self, hosts):
        self.names += [host.name for host in hosts if host.name not in self.names]
        self.is_only_here = self.names == ["localhost"]
        self.listed_slots = sum(host.slots for host in hosts)
        found = slots_of(hosts, 4)
        number = {n: self.names.index(host.name) for n, host in enumerate(hosts)}
        return [replace(slot, host=number[slot.host]) for slot in found]

    def follow(self, found):
        self.slots.change(self._listed(found), self.job._membership.live)

    def poll(self):
        return False

    def host_name(self, member):
        name = self.names[self.slots.host_of(member)]
        return "" if self.is_only_here else name

    def lose(self, number):
        self.lost.append(self.names[number])
        self.slots.lose(number)


class Store:
    """Notes what is set."""

    def __init__(self):
        self.values = {}

    @property
    def keys(self):
        return [*self.values]

    def set(self, key, value):
        self.values[key] = value

    def remove_prefix(self, prefix):
        for key in [key for key in self.values if key.startswith(prefix)]:
            del self.values[key]

    def remove(self, key):
        self.values.pop(key, None)


class Job:
    """Two members, whose messages the test sends.

    Args:
        slots: slots of the hosts at the start, by name.
    """

    def __init__(self, **slots):
        self.receiver, self.processes = Receiver(), Processes()
        hosts = [Host(name, count) for name, count in slots.items()]
        self.hosts = Hosts(*(hosts or [Host("localhost", 2)]))
        membership = Membership(2, min_size=1, max_restarts=0, max_size=4)
        self.store = Store()
        self.own = ElasticJob(membership, self.store, self.receiver, complain)
        self.processes.job = self.hosts.job = self.own
        self.processes.hosts = self.hosts
        self.own.attach(self.processes, self.hosts)
        self.own.begin()
        for member in range(2):
            self.hosts.slots.take(member, range(member))
            self.own.started(member, 1000 + member)

    def discover(self, error=None, **slots):
        hosts = [Host(name, count) for name, count in slots.items()]
        self.receiver.discovered(error or hosts)
        self.own.poll()

    def ask(self, member, generation):
        request = {
            "generation": generation,
            "committed": 5,
            "failed": [],
            "program": "",
        }
        self.receiver.put(request_key(member, generation), {**request, "program": ""})

    def stop(self, member):
        self.processes.stopped_members.add(member)


@pytest.fixture
def start():
    made = []

    def work(**slots):
        made.append(Job(**slots))
        return made[-1]

    yield work
    for one in made:
        one.receiver.close()


@pytest.fixture
def job(start):
    return start()


def test_a_member_that_is_stopped_while_others_connect_to_it_is_killed(job):
    """They would wait for it until the limit for connecting."""
    job.ask(0, 1)
    job.ask(1, 1)
    job.own.poll()
    assert job.processes.formed_ranks == [{0: 0, 1: 1}]
    assert not job.processes.killed
    job.stop(1)
    job.own.poll()
    assert job.processes.killed == [1]


def test_a_member_that_is_stopped_in_a_generation_that_has_begun_may_continue(job):
    """The other ranks decide whether it is lost."""
    job.ask(0, 1)
    job.ask(1, 1)
    job.own.poll()
    job.receiver.put(begun_key(1), True)  # late
    job.receiver.put(begun_key(2), True)
    job.stop(1)
    job.own.poll()
    assert not job.processes.killed


def test_the_beginning_of_an_earlier_generation_means_nothing(job):
    job.ask(0, 1)
    job.ask(1, 1)
    job.own.poll()
    job.receiver.put(begun_key(1), True)
    job.stop(1)
    job.own.poll()
    assert job.processes.killed == [1]


def test_a_slow_member_is_told_once_why_it_stays(job, capfd):
    for member in (1, 1, 99):
        job.receiver.put(leave_key(member), SLOW)
        job.own.poll()
    [line] = capfd.readouterr().err.splitlines()
    assert "rank 1" in line and "--max-restarts 0" in line and "SIGTERM" not in line


# ---- growing and shrinking ----


def test_newcomers_are_started_when_there_are_more_slots(job, capsys):
    job.discover(localhost=9)
    assert job.processes.started == ["newcomer 4", "newcomer 5"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("this host has 9 slots now: the job grows to 4 ranks")
    assert lines[1].endswith(f"newcomer 4 (process {os.getpid()}) is started")


def test_all_programs_are_told_that_the_job_shrinks(job, capsys):
    job.discover(localhost=1)
    assert job.store.keys == [ask_step_key(1), change_key(1)]
    assert "1 slot now: the job shrinks to 1 rank" in capsys.readouterr().err


def test_programs_that_do_not_hand_over_are_not_told_of_sigterm_to_tfdistrun(job):
    """They have it themselves, and may save."""
    job.own.preempt()
    assert job.store.keys == [ask_step_key(1)]


def test_a_script_that_fails_changes_nothing(job, capsys):
    job.discover(DiscoveryError("failed", "find.sh failed"))
    message = "warning: find.sh failed. The job keeps its 2 ranks"
    assert message in capsys.readouterr().err
    assert not job.store.keys and not job.processes.started


def test_slots_that_the_job_cannot_use_are_not_mentioned(job, capsys):
    job.discover(localhost=4)
    capsys.readouterr()
    job.discover(localhost=5)
    assert not capsys.readouterr().err


def test_a_newcomer_that_is_of_no_use_any_more_is_not_reported_as_lost(job, capsys):
    job.discover(localhost=3)
    job.discover(localhost=2)
    assert job.processes.killed == [4]
    assert "newcomer 4" in capsys.readouterr().err
    job.own.ended(4, "killed by SIGKILL", failed=True)
    assert not capsys.readouterr().err


def test_what_was_said_in_earlier_generations_is_forgotten(job):
    """A job may go on for weeks, and the store has a largest number of keys."""
    job.ask(0, 1)
    job.ask(1, 1)
    job.own.poll()
    counts = []
    for generation in range(2, 8):
        job.own._carry_out([AskStep(generation), EndAt(generation, generation)])
        job.ask(0, generation)
        job.ask(1, generation)
        job.own.poll()
        counts.append(len(job.store.values))
    assert counts[-1] == counts[1]
    job.own.ended(1, "killed", failed=True)
    assert not any(key.startswith("elastic/answer/1/") for key in job.store.keys)


# ---- several hosts ----


def test_a_newcomer_that_no_agent_has_reported_is_lost_with_its_host(start):
    job = start(a=1, b=1, c=1)
    job.discover(a=1, b=1, c=1)
    [member] = [one for one in job.own._membership.live if one > 1]
    del job.own._pids[member]  # the agent has not started it yet
    job.own.lose_host(2, "c", "c was lost")
    assert member in job.own._membership._killed


def test_the_ranks_get_their_places_on_their_hosts(start):
    job = start(a=1, b=1)
    job.ask(0, 1)
    job.ask(1, 1)
    job.own.poll()
    answers = [job.store.values[answer_key(member, 1)] for member in (0, 1)]
    found = [renewal.Place.from_answer(answer) for answer in answers]
    shared = {"generation": 2, "size": 2, "local_rank": 0, "local_size": 1}
    assert found == [
        renewal.Place(rank=rank, cross_rank=rank, cross_size=2, **shared)
        for rank in (0, 1)
    ]


def test_the_members_of_a_lost_host_are_not_replaced_where_no_room_is_left(
    start, capfd
):
    job = start(a=1, b=1)
    job.discover(a=2, b=1)
    assert len(job.processes.started) == 1
    job.own.lose_host(1, "b", "b was lost: its connection ended")
    job.own.lose_host(1, "b", "b was lost: its connection ended")  # is told once
    job.own.ended(1, "its host was lost", failed=True)
    assert job.hosts.lost == ["b"] and len(job.processes.started) == 1
    lines = capfd.readouterr().err.splitlines()
    assert "tfdistrun: b was lost: its connection ended" in lines
    assert lines[-1].endswith("rank 1 (process 1001 on b) was lost: its host was lost")
    failure = job.store.values[failure_key(1)]
    assert (failure["host"], failure["pid"]) == ("b", 1001)


def test_the_ranks_of_a_removed_host_leave_and_others_are_started(start, capsys):
    job = start(a=1, b=1)
    job.discover(a=1, c=2)
    assert job.processes.started == ["newcomer 4", "newcomer 5"]
    assert job.store.keys == [ask_step_key(1), change_key(1)]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("the hosts have 3 slots now: the job grows to 3 ranks")
    assert lines[1].endswith(
        "the slots of rank 1 were removed, and will be vacated once --min-np other "
        "ranks are ready"
    )
    assert lines[2].endswith(f"newcomer 4 (process {os.getpid()}) is started on c")
    job.discover(a=1, c=1)
    assert "rank 1 " not in capsys.readouterr().err  # this is told once


def test_removed_slots_are_not_reported_when_the_job_ends(start, capsys):
    job = start(a=1, b=1)
    job.own.preempt()
    capsys.readouterr()
    job.discover(a=1, c=2)
    assert capsys.readouterr().err == ""
