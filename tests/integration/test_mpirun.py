"""Ranks started by the mpirun of MPICH and of Open MPI, without tfdistrun."""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import marked, until
from helpers.mpi import KEEP_HOST_NAMES, KINDS, command, over_hosts, run

from tfdist.core import native

ROOT = Path(__file__).resolve().parents[2]
CLIENT = [sys.executable, "-m", "helpers.core_client"]

pytestmark = pytest.mark.skipif(
    not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
)
ON_HOSTS = """
from helpers import core_client
from tfdist.core import runtime, world
world.start()
core_client.steps(20, pause_s=0.0)
place = runtime.state.topology
print(f"rank {place.rank} of {place.size} on {place.cross_size} hosts", flush=True)
"""


@pytest.fixture(params=KINDS)
def mpirun(request):
    return command(request.param)


@pytest.mark.slow
def test_the_example_of_the_readme_runs_without_tfdistrun(mpirun, tmp_path):
    example = str(ROOT / "recipes" / "mnist_fit.py")
    done = run([*mpirun, "2", sys.executable, example], tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"same weights on all ranks: [0-9a-f]{12}", done.stdout)) == 1
    assert "on 2 ranks together" in done.stdout


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_each_other(mpirun, size, tmp_path):
    done = run([*mpirun, str(size), *CLIENT, "steps", "20"], tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) of (\d): all sums are right", done.stdout)
    assert sorted(told) == [(str(r), str(size)) for r in range(size)]
    assert os.listdir(tmp_path / "tfdist") == []  # the meeting point is removed


WHY_NOT = why_no_networks()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_example_of_the_readme_runs_on_two_hosts(mpirun, tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        words = over_hosts(hosts, mpirun, tmp_path)
        words += [sys.executable, str(ROOT / "recipes" / "mnist_fit.py")]
        done = run(words, tmp_path, timeout_s=200, **KEEP_HOST_NAMES)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"same weights on all ranks: [0-9a-f]{12}", done.stdout)) == 1
    assert "on 4 ranks together" in done.stdout


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_ranks_on_two_hosts_need_no_variables(mpirun, tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        words = over_hosts(hosts, mpirun, tmp_path)
        code = [sys.executable, "-c", ON_HOSTS]
        done = run([*words, *code], tmp_path, **KEEP_HOST_NAMES)
        again = run([*words, *CLIENT, "again", "2"], tmp_path, **KEEP_HOST_NAMES)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) of (\d) on (\d) hosts", done.stdout)
    assert sorted(told) == [(str(rank), "4", "2") for rank in range(4)]
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("again and again") == 4


def test_a_shell_between_mpirun_and_the_rank_does_not_matter(mpirun, tmp_path):
    script = " ".join(CLIENT) + " steps 5 && true"
    done = run([*mpirun, "2", "sh", "-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all sums are right") == 2


def test_two_jobs_at_once_do_not_meet(mpirun, tmp_path):
    script = f"{' '.join([*mpirun, '2', *CLIENT, 'steps', '20'])} & "
    done = run(["sh", "-c", script * 2 + "wait"], tmp_path)
    assert done.stdout.count("of 2: all sums are right") == 4, done.stderr


def test_a_killed_rank_ends_the_job(mpirun, tmp_path):
    mark = f"mark-{os.getpid()}-{Path(mpirun[0]).parent.parent.name}"
    done = run([*mpirun, "2", *CLIENT, "kill", "1"], tmp_path, MARK=mark)
    assert done.returncode != 0
    until(lambda: marked(mark) == [])  # mpirun may end a moment before its ranks
