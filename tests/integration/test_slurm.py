"""Ranks under a real Slurm: a controller and two daemons, which count as two hosts.

Debian: apt install slurmctld slurmd slurm-client munge libpmix-dev.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from helpers.deadline import deadline
from helpers.launcher import clean_environment
from helpers.tree import ROOT

from tfdist.core import native

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "munge")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
SPACES = (["--mpi=pmi2"], ["--mpi=pmix"], [])
SCRIPT = str(ROOT / "deploy" / "slurm" / "train.sbatch")
CLIENT = [sys.executable, "-m", "helpers.core_client"]
CONFIGURATION = """
ClusterName=tfdist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    if MISSING:
        return f"Slurm is not installed: {', '.join(MISSING)}"
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    done = subprocess.run(["munge", "-n"], capture_output=True, timeout=20)
    return "" if done.returncode == 0 else "the daemon munged does not run"


pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment variables with which srun reaches the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2", "tmp-n1", "tmp-n2"):
        (folder / name).mkdir()
    port, port1, port2 = free_ports(3)
    file = folder / "slurm.conf"
    file.write_text(
        CONFIGURATION.format(
            host=socket.gethostname(),
            folder=folder,
            **{"port": port, "port1": port1, "port2": port2},
        )
    )
    # Slurm 22.05 knows no cluster without control groups.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    commands = [["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]]
    daemons = [
        subprocess.Popen(
            [command[0], "-D", "-f", str(file), *command[1:]],
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
        )
        for command in commands
    ]
    environ = {"SLURM_CONF": str(file)}
    try:
        until = time.monotonic() + 30.0
        while True:
            done = subprocess.run(
                ["sinfo", "-h", "-o", "%t %D"],
                **{"env": {**os.environ, **environ}, "text": True, "timeout": 30},
                capture_output=True,
            )
            if done.stdout.split() == ["idle", "2"]:
                break
            if time.monotonic() > until:
                # As in a container without control groups, where slurmd cannot run.
                pytest.skip(f"Slurm did not start here: {done.stdout} {done.stderr}")
            time.sleep(0.2)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10.0)
            daemon.kill()


def srun(slurm, *words, timeout_s=50):
    done = subprocess.run(
        [shutil.which("srun"), "-N2", "-n4", "--overcommit", *words],
        **{"env": clean_environment(**slurm), "capture_output": True, "text": True},
        timeout=timeout_s,
    )
    if "Unable to load any plugin" in done.stderr:
        pytest.skip("Slurm cannot load PMIx (Debian: apt install libpmix-dev)")
    return done


@pytest.mark.parametrize("space", SPACES, ids=["pmi2", "pmix", "plain"])
@deadline(90)
def test_ranks_on_two_hosts_need_no_variables(slurm, space):
    done = srun(slurm, *space, *CLIENT, "steps", "20")
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) of (\d): all sums are right", done.stdout)
    assert sorted(told) == [(str(rank), "4") for rank in range(4)]


@deadline(90)
def test_plain_ranks_can_leave_and_meet_again(slurm):
    done = srun(slurm, *CLIENT, "again", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("again and again") == 4


@deadline(90)
def test_without_a_space_the_message_names_one(slurm):
    done = srun({**slurm, "PATH": "/no-munge"}, *CLIENT, "steps", "20")
    assert done.returncode != 0
    assert "only 2 of 4 ranks are on this host" in done.stderr
    assert "start them with srun --mpi=pmi2 (or pmix)" in done.stderr


@deadline(90)
def test_the_script_of_the_page_runs(slurm, tmp_path):
    program = "from helpers import core_client; core_client.main('steps', '20')"
    (tmp_path / "train.py").write_text(program)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sbatch", "--wait", "--overcommit", "-o", str(tmp_path / "log"), SCRIPT],
        **{"env": clean_environment(PATH=path, **slurm), "cwd": tmp_path},
        **{"capture_output": True, "text": True, "timeout": 80},
    )
    log = (tmp_path / "log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert log.count("all sums are right") == 4


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES, ids=["pmi2", "pmix", "plain"])
@deadline(300)
def test_the_example_of_the_readme_trains(slurm, space):
    recipe = "recipes/mnist_fit.py"
    done = srun(slurm, *space, sys.executable, recipe, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"same weights on all ranks: [0-9a-f]{12}", done.stdout)) == 1
