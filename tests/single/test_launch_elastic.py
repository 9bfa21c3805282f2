"""tfdistrun's part in elastic jobs: messages of the members, and their processes."""

import os
import signal
import subprocess

import psutil
import pytest
from helpers.launcher import until

from tfdist.core.rendezvous.store import SLOW, begun_key, leave_key, request_key
from tfdist.launch.elastic import ElasticJob, Receiver
from tfdist.launch.membership import Membership


class Processes:
    """Notes what it is asked for."""

    def __init__(self):
        self.killed, self.formed_ranks = [], []

    def start(self, member):
        return False

    def kill(self, member):
        self.killed.append(member)

    def formed(self, ranks):
        self.formed_ranks.append(dict(ranks))

    def end_job(self):
        raise AssertionError("the job could go on")


class Store:
    """Drops what is set."""

    def set(self, key, value):
        pass

    def drop(self, prefix):
        pass


class Job:
    """Two members, whose messages the test sends; they have processes of their own."""

    def __init__(self):
        self.receiver, self.processes = Receiver(), Processes()
        membership = Membership(2, min_size=1, max_restarts=0)
        self.own = ElasticJob(membership, Store(), self.receiver)
        self.own.attach(self.processes)
        self.sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        for member, process in enumerate(self.sleeping):
            self.own.started(member, process.pid)

    def ask(self, member, generation):
        request = {
            "generation": generation,
            "committed": 5,
            "failed": [],
            "program": "",
        }
        self.receiver.put(request_key(member, generation), {**request, "program": ""})

    def stop(self, member):
        pid = self.sleeping[member].pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def job():
    made = Job()
    yield made
    for process in made.sleeping:
        process.kill()
        process.wait(5)
    made.receiver.close()


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
