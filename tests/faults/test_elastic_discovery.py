"""Elastic jobs whose discovery script adds and removes hosts: no step is lost."""

import signal
import socket
import sys
import time

import numpy as np
import psutil
import pytest
from helpers import elastic_program
from helpers.deadline import deadline
from helpers.elastic_folder import finish_at, latest_size, lines
from helpers.elastic_hosts import Job, agent_of
from helpers.hosts import plain_hosts
from helpers.launcher import finish, start, until
from helpers.slots import Slots

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with plain_hosts(tmp_path_factory.mktemp("hosts"), "host-a", "host-b") as made:
        yield made


def members_now(job, size):
    """The members of the newest generation, once all of them have taken a step."""
    found = set()

    def are_known():
        rows = job.rows()
        newest = rows[-1]["generation"] if rows else 0
        last = [row for row in rows if row["generation"] == newest]
        found.clear()
        found.update(row["member"] for row in last)
        return len(found) == size == (last[0]["size"] if last else 0)

    until(are_known, 40.0)
    return found


@deadline(30)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_first_run_of_the_script_ends_the_script(tmp_path, number):
    script = tmp_path / "find.sh"
    script.write_text("#!/bin/sh\necho $$ >pid\nexec sleep 60\n")
    script.chmod(0o755)
    options = ("-np", "1", "--min-np", "1", "--host-discovery-script", str(script))
    process = start(tmp_path, *options, "true")
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text(), 20)
    process.send_signal(number)
    done = finish(process, 10)
    assert (done.code, done.stdout, done.stderr) == (128 + number, "", "")
    assert not psutil.pid_exists(int(pid.read_text()))


@deadline(60)
def test_a_job_grows_onto_a_new_host_and_leaves_it_again(hosts, tmp_path):
    slots = Slots(tmp_path, 2)
    job = Job.start_with(tmp_path, hosts, *slots.options(np=2))
    job.wait_for(2)
    slots.set({"localhost": 2, "host-a": 2})
    job.wait_for(4, generation=2)
    agent = agent_of(job, 4)
    assert agent == agent_of(job, 5)
    slots.set(2)
    assert members_now(job, 2) == {0, 1}
    until(lambda: not agent.is_running(), 10.0)
    done = job.finish()
    assert "newcomer 4 is started on host-a" in done.stderr
    assert "the hosts have 4 slots now: the job grows to 4 ranks" in done.report
    assert "the hosts have 2 slots now: the job shrinks to 2 ranks" in done.report
    assert "was lost" not in done.stderr, done.stderr


# In `make test`: tests/single/test_launch_host_pool.py.
@pytest.mark.slow
@deadline(60)
def test_a_job_moves_from_one_host_to_another(hosts, tmp_path):
    """With --min-np equal to -np, it never has fewer ranks."""
    slots = Slots(tmp_path, {"host-a": 2})
    job = Job.start_with(tmp_path, hosts, *slots.options(np=2, least=2, most=2))
    job.wait_for(2)
    agent = agent_of(job, 0)
    slots.set({"host-b": 2})
    until(lambda: members_now(job, 2).isdisjoint({0, 1}), 40.0)
    until(lambda: not agent.is_running(), 10.0)
    moved = members_now(job, 2)
    assert len({agent_of(job, member) for member in moved}) == 1
    done = job.finish()
    assert {row["size"] for row in job.rows()} == {2}
    assert "the slots of ranks 0 and 1 were removed" in done.stderr
    assert "is started on host-b" in done.stderr
    assert "was lost" not in done.stderr, done.stderr


# In `make test`: tests/single/test_launch_host_pool.py.
@pytest.mark.slow
@deadline(60)
def test_the_job_goes_on_without_a_host_that_cannot_be_reached(hosts, tmp_path):
    slots = Slots(tmp_path, {"host-a": 1})
    job = Job.start_with(tmp_path, hosts, *slots.options(np=1))
    job.wait_for(1)
    slots.set({"host-a": 1, "host-x": 2, "host-b": 1})
    job.wait_for(2, generation=2)
    done = job.finish()
    warning = "warning: host-x cannot be used: tfdist could not be started there"
    assert done.stderr.count(warning) == 1, done.stderr
    assert done.stderr.count("connect to host host-x") == 1
    assert "The job continues without it" in done.stderr
    assert "the job grows to 2 ranks" in done.stderr


# In `make test`: tests/single/test_launch_host_pool.py.
@pytest.mark.slow
@deadline(60)
def test_a_lost_host_is_used_again_when_it_is_removed_and_added(hosts, tmp_path):
    slots = Slots(tmp_path, {"host-a": 1, "host-b": 1})
    job = Job.start_with(tmp_path, hosts, *slots.options(np=2))
    job.wait_for(2)
    agent_of(job, 1).kill()
    job.wait_for(1, generation=2)
    slots.set({"host-a": 1})
    time.sleep(1.5)  # the script runs once a second
    slots.set({"host-a": 1, "host-b": 1})
    job.wait_for(2, generation=3)
    member = max(members_now(job, 2))
    assert agent_of(job, member) != agent_of(job, 0)
    done = job.finish()
    assert done.stderr.count("host-b was lost: its connection ended") == 1
    assert f"newcomer {member} is started on host-b" in done.stderr


@pytest.mark.slow
@deadline(90)
def test_a_host_that_does_not_answer_does_not_hold_up_the_job(hosts, tmp_path):
    """Nobody serves its socket, but it accepts connections."""
    slots = Slots(tmp_path, {"host-a": 1})
    options = (*slots.options(np=1), "--host-timeout-s", "4")
    job = Job.start_with(tmp_path, hosts, *options)
    job.wait_for(1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(hosts.folder / "host-s"))
        silent.listen(4)
        slots.set({"host-s": 1, "host-a": 2})
        job.wait_for(2, generation=2)  # before the time is over
        committed = job.report(0).committed
        time.sleep(6.0)
        assert job.report(0).committed > committed
        assert not hosts.clients(job.process.pid).keys() & {"host-s"}
    done = job.finish()
    assert done.stderr.count("warning: host-s cannot be used") == 1, done.stderr
    assert "no answer within 4 s (--host-timeout-s)" in done.stderr


@pytest.mark.slow
@deadline(240)
def test_a_training_loop_moves_to_another_host_and_loses_no_step(hosts, tmp_path):
    (tmp_path / "slow").touch()
    slots = Slots(tmp_path, {"host-a": 2})
    words = [*slots.options(np=2, least=2, most=2), *hosts.ssh]
    program = [sys.executable, "-m", "helpers.elastic_program", str(tmp_path), "100000"]
    process = start(tmp_path, *words, *program, TFDIST_ADDRESS=hosts.address)
    commits = tmp_path / "commits"
    until(lambda: latest_size(commits) == 2, 90.0)
    slots.set({"host-b": 2})
    until(lambda: {row["member"] for row in lines(commits)[-2:]} == {2, 3}, 90.0)
    steps = lines(commits)[-1]["step"] + 50
    done = finish_at(tmp_path, process, steps)
    result = np.load(tmp_path / "result.npz")
    uses, order = elastic_program.expected(steps)
    assert np.array_equal(result["uses"], uses) and result["order"] == order
    assert {row["size"] for row in lines(commits)} == {2}
    assert not lines(tmp_path / "undone")
    assert "was lost" not in done.stderr, done.stderr
