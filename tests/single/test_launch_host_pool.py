"""The hosts of a job, which a discovery script adds and removes, without processes."""

import os
import time
from types import SimpleNamespace

import pytest

from tfdist.launch import agent_job, host_pool, options
from tfdist.launch.host_pool import HostPool
from tfdist.launch.hosts import Host, Slot
from tfdist.launch.job import Plan
from tfdist.launch.output import complain


class Agent:
    """A connection whose state the test sets."""

    def __init__(self, host, ranks, connection, number):
        self.host, self.number, self.state = host, number, "connecting"
        self.failure, self.warnings, self.threads = "", [], ""
        self.bound, self.calls = [[0], [1]], []

    def prepare(self, job):
        self.job = job

    def go(self):
        self.state = "running"

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


class Pool(HostPool):
    """A pool of this host with one slot; processes run where the test says."""

    def __init__(self, *words):
        words = ["-np", "1", "--min-np", "1", "--max-np", "4", *words, "true"]
        hosts = [Host("localhost", 1, is_local=True)]
        plan = Plan(hosts, [], 4, [Slot(0, 0)], {0: [(0,)]}, can_get_hosts=True)
        job = SimpleNamespace(
            plan=plan,
            options=options.parser().parse_args(words),
            name="job",
            complain=complain,
            place=None,
            secret=b"",
            shm_bytes=0,
        )
        job.options.signal_grace_s = 1.0
        super().__init__(job, "127.0.0.1:1")
        self.watched, self.closed, self.members = [], [], set()
        self.supervisor = SimpleNamespace(
            running=self.members,
            paused=False,
            add_remote=self.watched.append,
            close_remote=self.closed.append,
        )
        self.attach(self.supervisor)

    def list(self, **slots):
        """Follows an answer of the script; returns the number of slots."""
        self.follow([Host(name, n, name == "localhost") for name, n in slots.items()])
        return self.slots.room

    def ready(self, number):
        self.agents[number].state = "ready"
        return self.poll()


@pytest.fixture
def pool(monkeypatch):
    for name in agent_job.missed(os.environ, {}):  # tfdistrun warns of these
        monkeypatch.delenv(name)
    monkeypatch.setattr(host_pool.remote, "RemoteHost", Agent)
    monkeypatch.setattr(host_pool, "SshConnection", lambda *_: None)
    return Pool()


def test_the_slots_of_a_new_host_are_added_when_its_agent_is_ready(pool):
    assert pool.list(a=2, localhost=1) == 1
    [agent] = pool.watched
    assert agent.job["slots"] == 2 and agent.job["ranks"] == []
    assert not pool.poll()
    assert pool.ready(1) and agent.state == "running"
    assert pool.slots.room == pool.listed_slots == 3
    assert pool.slots.take(0, []) == Slot(1, 0)  # the script lists it first
    assert not pool.poll()


def test_a_host_that_fails_is_told_once_and_tried_again_when_it_comes_back(
    pool, capsys
):
    pool.list(localhost=1, a=2)
    pool.agents[1].failure = "no answer\n  start it"
    assert not pool.poll()
    assert pool.closed == pool.watched and not pool.agents
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "tfdistrun: warning: a cannot be used: no answer",
        "tfdistrun:   start it",
    ]
    assert "It is tried again when" in lines[2]
    assert pool.list(localhost=1, a=3) == 1  # still listed
    pool.poll()
    assert len(pool.watched) == 1
    pool.list(localhost=1)
    pool.list(localhost=1, a=3)
    assert len(pool.watched) == 2 and pool.ready(2)
    assert not capsys.readouterr().err


def test_paused_output_does_not_time_out_a_new_host(monkeypatch):
    monkeypatch.setattr(host_pool.remote, "RemoteHost", Agent)
    monkeypatch.setattr(host_pool, "SshConnection", lambda *_: None)
    pool = Pool("--host-timeout-s", "0.05")
    pool.supervisor.paused = True
    pool.list(localhost=1, a=1)
    time.sleep(0.1)
    assert not pool.poll() and not pool.agents[1].calls
    pool.supervisor.paused = False
    assert not pool.poll() and not pool.agents[1].calls
    time.sleep(0.1)
    pool.poll()
    assert pool.agents[1].calls == ["time_out"]


def test_a_host_that_is_removed_while_it_connects_is_ended_and_nothing_is_said(
    pool, capsys
):
    pool.list(localhost=1, a=1)
    pool.list(localhost=1)
    assert not pool.poll()
    assert pool.closed == pool.watched and not capsys.readouterr().err
    pool.list(localhost=1, a=1)
    assert len(pool.watched) == 2


def test_a_host_that_is_removed_and_added_while_it_connects_goes_on_connecting(pool):
    pool.list(localhost=1, a=1)
    pool.list(localhost=1)
    pool.list(localhost=1, a=1)
    assert len(pool.watched) == 1 and pool.ready(1)


def test_the_agent_of_a_removed_host_ends_after_its_last_process(pool):
    pool.list(localhost=1, a=1)
    pool.ready(1)
    pool.slots.take(0, [])
    pool.slots.take(1, [0])
    pool.members.update([0, 1])
    assert pool.list(localhost=1) == 1 and pool.slots.unwanted(pool.members) == {1}
    pool.poll()
    assert pool.agents.keys() == {1}
    assert pool.list(localhost=1, a=1) == 2  # the same agent goes on
    assert len(pool.watched) == 1 and not pool.slots.unwanted(pool.members)
    pool.list(localhost=1)
    pool.members.remove(1)
    pool.poll()
    assert not pool.agents and pool.watched[0].calls == ["finish"]
    pool.list(localhost=1, a=1)
    assert len(pool.watched) == 2 and pool.agents.keys() == {2}


def test_a_lost_host_comes_back_as_another_one(pool):
    pool.list(localhost=1, a=1)
    pool.ready(1)
    pool.lose(1)
    assert pool.list(localhost=2, a=1) == 2
    pool.list(localhost=1)
    pool.list(localhost=1, a=1)
    assert pool.ready(2) and pool.slots.room == 2
    pool.slots.take(0, [])
    pool.slots.take(1, [0])
    assert pool.slots.host_of(1) == 2 and pool.host_name(1) == "a"


def test_a_removed_host_that_is_lost_with_its_last_process_comes_back(pool):
    pool.list(localhost=1, a=1)
    pool.ready(1)
    pool.list(localhost=1)
    pool.lose(1)
    pool.list(localhost=1, a=1)
    assert len(pool.watched) == 2


def test_processors_are_reported_in_the_order_of_the_ranks(pool, capsys):
    """This host is known before the others, but may be listed after them."""
    pool.hosts = [Host("a", 2), Host("localhost", 1, is_local=True)]
    pool._bound = {1: [(0,)], 0: [[2], [3]]}
    assert [line.split(" may")[0] for line in pool._binding_lines()] == [
        *("rank 0 on a", "rank 1 on a", "rank 2 on localhost")
    ]


def test_an_agent_is_kept_as_long_as_its_host_has_slots(pool):
    pool.list(localhost=1, a=1)
    pool.ready(1)
    pool.slots._least = 2
    assert pool.list(localhost=1) == 2
    pool.poll()
    assert 1 in pool.agents
    assert pool.list(localhost=2) == 2
    pool.poll()
    assert 1 not in pool.agents


def test_this_host_may_be_added_later(pool):
    pool.list(a=1)
    pool.ready(1)
    assert pool.slots.room == 1
    assert pool.list(a=1, localhost=2) == 3
    assert pool.processors(Slot(0, 0)) == pool.processors(Slot(0, 1)) == (0,)


def test_a_connection_that_takes_too_long_is_ended(monkeypatch, capsys):
    monkeypatch.setattr(host_pool.remote, "RemoteHost", Agent)
    monkeypatch.setattr(host_pool, "SshConnection", lambda *_: None)
    pool = Pool("--host-timeout-s", "0")
    pool.list(localhost=1, a=1)
    pool.poll()
    assert pool.watched[0].calls == ["time_out"]  # it may say what it waits for
    pool._deadlines_s[1] -= 2.0
    pool.poll()
    assert pool.closed == pool.watched
