"""tfdistrun --bind-to: what ranks may really use, on this host and on others."""

import os
import subprocess
import sys

import pytest
from helpers.deadline import deadline
from helpers.hosts import plain_hosts
from helpers.launcher import clean_environment, run

from tfdist.launch import processes, topology
from tfdist.launch.binding import THREADS, divide

pytestmark = pytest.mark.faults
CORES = {(one.socket, one.core) for one in topology.own()}
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
# The shell starts a program: what a rank starts is bound as it is.
SHOW = ["sh", "-c", "grep Cpus_allowed_list: /proc/self/status"]


def expected(ranks, kind):
    return [topology.ranges(one) for one in divide(topology.own(), ranks, kind)]


def seen(done, ranks):
    """The processors that each rank found."""
    assert done.code == 0, done.stderr
    lines = dict(line.split("Cpus_allowed_list:") for line in done.stdout.splitlines())
    return [lines[f"[rank {rank}] "].strip() for rank in range(ranks)]


@two_cores
@pytest.mark.parametrize("kind", ["core", "slice"])
@deadline(40)
def test_each_rank_has_its_own_processors_and_they_are_reported(tmp_path, kind):
    done = run(tmp_path, "-np", "2", "--bind-to", kind, "--report-bindings", *SHOW)
    bound = expected(2, kind)
    assert seen(done, 2) == bound
    assert bound[0] != bound[1]
    for rank in range(2):
        line = f"rank {rank} on localhost may use processor"
        (told,) = [text for text in done.report if text.startswith(line)]
        assert told.split()[-1] == bound[rank]


@two_cores
@deadline(40)
def test_only_what_the_launcher_itself_may_use_is_dealt_out(tmp_path):
    kept = topology.own()[-1].number
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{kept}}})"]
    command[-1] += "; from tfdist.launch import cli; raise SystemExit(cli.main())"
    words = ["-np", "1", "--bind-to", "slice", *SHOW]
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == ["Cpus_allowed_list:", str(kept)], done.stderr


@two_cores
@deadline(90)
def test_ranks_are_crowded_where_they_share_a_processor_alone(tmp_path):
    say = "import tfdist; from tfdist.core import native; tfdist.init(); "
    say += "print(native.counters()['crowded']); tfdist.shutdown()"
    first = topology.own()[0].number
    meet = f"import os; os.sched_setaffinity(0, {{{first}}}); "
    for code, word in ((say, "False"), (meet + say, "True")):
        words = ["-np", "2", "--bind-to", "core", sys.executable, "-c", code]
        done = run(tmp_path, *words)
        assert done.code == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            f"[rank {rank}] {word}" for rank in range(2)
        ]


@deadline(60)
def test_other_hosts_bind_by_their_own_processors(tmp_path):
    with plain_hosts(tmp_path, "host-a", "host-b") as hosts:
        words = ["-np", "3", "-H", "localhost,host-a,host-b", *hosts.ssh]
        words += ["--bind-to", "core", "--report-bindings"]
        done = run(tmp_path, *words, *SHOW, TFDIST_ADDRESS=hosts.address)
        assert seen(done, 3) == expected(1, "core") * 3  # each the first of its host
        (told,) = [text for text in done.report if text.startswith("rank 2 on host-b")]
        assert told.split()[-1] == expected(1, "core")[0]

        many = len(os.sched_getaffinity(0)) + 1
        words = ["-np", str(many), "-H", f"host-b:{many}", *hosts.ssh]
        words += ["--bind-to", "slice", "true"]
        done = run(tmp_path, *words, TFDIST_ADDRESS=hosts.address)
        assert done.code == 2
        assert "host-b: --bind-to slice: expected at most one rank" in done.stderr


@deadline(60)
def test_warnings_know_the_threads_that_another_host_has_set_itself(tmp_path):
    here = len(os.sched_getaffinity(0))
    with plain_hosts(tmp_path, "host-a") as hosts:
        login = tmp_path / "login"  # as the profile of that host's user would
        there = f"export {THREADS}={here + 1}; "
        login.write_text(f'#!/bin/sh\nexec {hosts.ssh[1]} "$1" "{there}$2"\n')
        login.chmod(0o700)
        words = ["-np", "2", "-H", "localhost,host-a", "--ssh-command", str(login)]
        show = ["sh", "-c", f"echo has ${THREADS}."]
        done = run(tmp_path, *words, *show, TFDIST_ADDRESS=hosts.address)
        assert f"[rank 1] has {here + 1}." in done.stdout
        assert f"warning: {THREADS}={here + 1}, but rank 1 may use" in done.stderr
        unequal = f"warning: rank 0 will have {here} TensorFlow threads, rank 1"
        assert unequal in done.stderr
        # Variables passed with -x count there too.
        words += ["-x", f"{THREADS}={here}"]
        done = run(tmp_path, *words, *show, TFDIST_ADDRESS=hosts.address)
        assert f"[rank 1] has {here}." in done.stdout
        assert THREADS not in done.stderr


def test_a_processor_that_is_gone_is_an_error_of_that_rank(tmp_path):
    child = [*processes.standalone("exec"), str(os.getpid())]
    done = subprocess.run([*child, "99999", "true"], capture_output=True, text=True)
    assert done.returncode == 126
    assert "cannot bind to processors 99999: Invalid argument" in done.stderr
