"""Elastic jobs on several hosts: ranks and hosts are lost, but no step is."""

import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
from helpers import elastic_fit_program, elastic_program
from helpers.deadline import deadline
from helpers.elastic_folder import finish_at, latest_size, lines
from helpers.elastic_hosts import Job, agent_of
from helpers.hosts import networked_hosts, plain_hosts, why_no_networks
from helpers.launcher import finish, start, until

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with plain_hosts(tmp_path_factory.mktemp("hosts"), "host-a", "host-b") as made:
        yield made


# In `make test` with its output, below.
@pytest.mark.slow
@deadline(60)
def test_a_lost_rank_is_replaced_on_its_host(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (2, 2), "-np", "4", "--min-np", "1")
    job.wait_for(4)
    agent = agent_of(job, 2)
    job.kill(2)
    job.wait_for(4, generation=2)
    assert agent_of(job, 4) == agent
    done = job.finish()
    pid = job.report(4).pid
    assert "rank 2 (process " in done.stderr and " on host-b) was lost" in done.stderr
    assert "replacement 4 is started on host-b" in done.stderr
    assert pid == next(row["pid"] for row in job.rows() if row["member"] == 4)


@deadline(60)
def test_the_job_goes_on_without_a_lost_host(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (2, 2), "-np", "4", "--min-np", "2")
    job.wait_for(4)
    agent_of(job, 3).kill()
    job.wait_for(2, generation=2)
    done = job.finish()
    assert "host-b was lost: its connection ended with exit code " in done.stderr
    assert "was lost: its host was lost" in done.stderr
    assert "is started" not in done.stderr, done.stderr
    assert {row["member"] for row in job.rows() if row["size"] == 2} == {0, 1}


# In `make test` on another host, below.
@pytest.mark.slow
@deadline(60)
def test_the_ranks_of_a_lost_host_are_replaced_on_this_host(hosts, tmp_path):
    """Their pipes get the numbers of the descriptors of the lost connection."""
    (tmp_path / "hold").touch()
    words = ["-np", "3", "--min-np", "1", "-H", "host-a:2,localhost:3", *hosts.ssh]
    client = "import helpers.elastic_client as client, pathlib, sys"
    run = "client.main(pathlib.Path(sys.argv[1]), 1); print('finished')"
    program = [sys.executable, "-c", f"{client}; {run}", str(tmp_path)]
    environ = {"TFDIST_ADDRESS": hosts.address}
    job = Job(tmp_path, start(tmp_path, *words, *program, **environ))
    job.wait_for(3)
    agent_of(job, 0).kill()
    job.wait_for(3, generation=2)
    time.sleep(2.5)  # more than two periodic checks of the hosts
    done = job.finish()
    assert "is started on localhost" in done.stderr
    ends = sorted(done.stdout.splitlines())
    assert ends == [f"[rank {rank}] finished" for rank in range(3)]


# In `make test` on hosts with free slots, below.
@pytest.mark.slow
@deadline(60)
def test_rank_0_may_be_on_the_lost_host(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (1, 2), "-np", "3", "--min-np", "1")
    job.wait_for(3)
    agent_of(job, 0).kill()
    job.wait_for(2, generation=2)
    job.finish()


@deadline(60)
def test_lost_ranks_are_replaced_on_hosts_with_free_slots(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (2, 4), "-np", "4", "--min-np", "1")
    job.wait_for(4)
    agent = agent_of(job, 2)
    agent_of(job, 0).kill()
    job.wait_for(4, generation=2)
    assert agent_of(job, 4) == agent_of(job, 5) == agent
    done = job.finish()
    assert "replacement 4 is started on host-b" in done.stderr


# In `make test`: tests/single/test_launch_elastic.py.
@pytest.mark.slow
@deadline(60)
def test_the_job_ends_if_the_hosts_that_are_left_have_too_little_room(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (2, 2), "-np", "4", "--min-np", "3")
    job.wait_for(4)
    agent_of(job, 3).kill()
    done = finish(job.process, 30.0)
    assert done.code != 0
    message = "2 ranks are left, but --min-np is 3, and the remaining hosts have room"
    assert f"{message} for only 2 ranks" in done.stderr


@deadline(60)
def test_a_stopped_rank_of_another_host_is_killed_and_replaced(hosts, tmp_path):
    job = Job.start(tmp_path, hosts, (1, 2), "-np", "3", "--min-np", "1")
    job.wait_for(3)
    job.kill(2, signal.SIGSTOP)
    job.wait_for(3, generation=3)
    done = job.finish()
    assert "on host-b) is killed: it is stopped (SIGSTOP)" in done.stderr


@deadline(60)
def test_the_output_of_a_replacement_on_another_host_is_shown(hosts, tmp_path):
    code = (
        "import os, runpy, sys; print('number', os.environ['TFDIST_MEMBER'], "
        "os.environ['TFDIST_LOCAL_RANK'], os.environ['LOGGED_IN'], flush=True); "
        f"sys.argv[1:] = [{str(tmp_path)!r}, '1']; "
        "runpy.run_module('helpers.elastic_client', run_name='__main__')"
    )
    (tmp_path / "hold").touch()
    words = ["-np", "3", "--min-np", "1", *hosts.slots(1, 2), *hosts.ssh]
    environ = {"TFDIST_ADDRESS": hosts.address}
    process = start(tmp_path, *words, sys.executable, "-c", code, **environ)
    job = Job(tmp_path, process)
    job.wait_for(3)
    job.kill(2)
    job.wait_for(3, generation=2)
    done = job.finish()
    assert "[replacement 3] number 3 1 yes" in done.stdout
    assert list(tmp_path.glob("tfdist-logs/*/replacement-3.log"))


@deadline(60)
def test_a_host_that_gets_sigterm_hands_over_its_ranks(hosts, tmp_path):
    (tmp_path / "hold").touch()
    words = ["-np", "3", "--min-np", "1", *hosts.slots(1, 2), *hosts.ssh]
    program = [sys.executable, "-m", "helpers.elastic_handover", str(tmp_path), "1"]
    environ = {"TFDIST_ADDRESS": hosts.address}
    job = Job(tmp_path, start(tmp_path, *words, *program, **environ))
    job.wait_for(3)
    agent = agent_of(job, 2)
    agent.terminate()
    job.wait_for(1, generation=2)
    until(lambda: not agent.is_running(), 10.0)
    done = job.finish()
    assert not lines(tmp_path / "undone")
    assert (
        "the agent on host-b got a signal; no process is started there" in done.stderr
    )
    assert "was lost" not in done.stderr and "replacement" not in done.stderr


# ---- programs with TensorFlow ----


def start_program(module, folder, hosts, counts, *options):
    """Starts a program that runs until `finish_at`, on two hosts."""
    (folder / "slow").touch()
    words = [*options, *hosts.slots(*counts), *hosts.ssh]
    program = [sys.executable, "-m", f"helpers.{module}", str(folder), "100000"]
    program += ["{}"] if "fit" in module else []
    return start(folder, *words, *program, TFDIST_ADDRESS=hosts.address)


def agent_of_rank(folder, rank):
    """The agent that has started the process that is this rank now."""
    found = []

    def is_running():
        latest = [row for row in lines(folder / "commits") if row["rank"] == rank][-1:]
        found[:] = [row["pid"] for row in latest if psutil.pid_exists(row["pid"])]
        return found

    until(is_running, 30.0)
    return psutil.Process(found[0]).parent()


# In `make test` without TensorFlow, above.
@pytest.mark.slow
@deadline(90)
def test_the_ranks_of_a_host_that_gets_sigterm_hand_over(hosts, tmp_path):
    options = ("-np", "3", "--min-np", "1")
    process = start_program("elastic_program", tmp_path, hosts, (1, 2), *options)
    until(lambda: latest_size(tmp_path / "commits") == 3, 60.0)
    agent_of_rank(tmp_path, 2).terminate()
    until(lambda: latest_size(tmp_path / "commits") == 1, 30.0)
    time.sleep(1.5)  # the agent has ended
    steps = lines(tmp_path / "commits")[-1]["step"] + 50
    done = finish_at(tmp_path, process, steps)
    result = np.load(tmp_path / "result.npz")
    uses, order = elastic_program.expected(steps)
    assert np.array_equal(result["uses"], uses) and result["order"] == order
    assert not lines(tmp_path / "undone")
    assert (
        "the agent on host-b got a signal; no process is started there" in done.stderr
    )
    assert "was lost" not in done.stderr and "replacement" not in done.stderr


@pytest.mark.slow
@deadline(180)
def test_a_fit_loses_ranks_and_a_host(hosts, tmp_path):
    options = ("-np", "3", "--min-np", "1")
    program = "elastic_fit_program"
    process = start_program(program, tmp_path, hosts, (1, 2), *options)
    until(lambda: latest_size(tmp_path / "commits") == 3, 90.0)
    os.kill(lines(tmp_path / "commits")[-1]["pid"], signal.SIGKILL)
    until(lambda: latest_size(tmp_path / "commits") == 2, 30.0)
    until(lambda: latest_size(tmp_path / "commits") == 3, 60.0)
    agent_of_rank(tmp_path, 0).kill()
    until(lambda: latest_size(tmp_path / "commits") == 2, 30.0)
    epochs = lines(tmp_path / "commits")[-1]["epoch"] + 15
    finish_at(tmp_path, process, epochs)
    elastic_fit_program.check(tmp_path, epochs)


# ---- hosts with networks of their own ----

WHY_NOT = why_no_networks()


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    with networked_hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


# In `make test`: a host whose agent is killed, above.
@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("lost", "hears_ssh"),
    [(0, False), (1, True)],
)
@deadline(120)
def test_the_job_goes_on_without_a_host_whose_cable_is_pulled(
    lost, hears_ssh, networks, tmp_path
):
    """Its ssh may use the same cable, or another one."""
    job = Job.start(tmp_path, networks, (2, 2), "-np", "4", "--min-np", "2")
    job.wait_for(4)
    clients = networks.clients(job.process.pid)
    ssh = clients[networks.names[lost]]
    try:
        networks.cable(lost, "down")
        if not hears_ssh:
            ssh.suspend()
        job.wait_for(2, generation=2)
    finally:
        networks.cable(lost, "up")
    done = job.finish()
    name = networks.names[lost]
    assert "another rank reported 5 s ago" in done.stderr
    if hears_ssh:
        assert f"on {name}) was lost: killed by SIGKILL" in done.stderr
    else:
        message = (
            f"{name} was lost: its agent did not confirm that a process was killed"
        )
        assert message in done.stderr
