"""Runs tfdistrun as a user does, and finds what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from helpers.deadline import PATIENCE

# With stacks of its threads on standard error, where it must be aborted.
TFDISTRUN = [sys.executable, "-X", "faulthandler", "-m", "tfdist.launch"]
# A rank's program that takes its time when it is told to end.
SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(1.5)
    open(f"saved{os.environ['TFDIST_RANK']}", "w").close()
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
print("ready", flush=True)
for _ in range(600):  # a signal that comes just before a sleep does not end the sleep
    time.sleep(0.1)
"""


def shell(script: str) -> list[str]:
    """A command of tfdistrun."""
    return ["sh", "-c", script]


def python(code: str) -> list[str]:
    """A command of tfdistrun."""
    return [sys.executable, "-c", code]


def saved(folder: Path) -> list[str]:
    """What ranks that run `SAVES` in this folder have left there."""
    return sorted(file.name for file in folder.glob("saved*"))


@dataclass
class Run:
    """What a finished tfdistrun printed and returned."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def report(self) -> list[str]:
        """The lines of tfdistrun itself, without its warnings."""
        lines = [
            line.removeprefix("tfdistrun: ")
            for line in self.stderr.splitlines()
            if line.startswith("tfdistrun: ")
        ]
        return [line for line in lines if not line.startswith("warning: ")]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of this process without any launcher's variables."""
    foreign = re.compile(
        r"(_?TFDIST_|OMPI_|PMI_|PMIX_|SLURM_|PALS_|FLUX_|JSM_|PET_|SM_)|"
        r"(RANK|WORLD_SIZE|TF_CONFIG|CLUSTER_SPEC|JOB_COMPLETION_INDEX)$"
    )
    environ = {k: v for k, v in os.environ.items() if not foreign.match(k)}
    root = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = os.pathsep.join(
        [root, str(Path(root) / "tests"), environ.get("PYTHONPATH", "")]
    )
    return {**environ, **more}


_started: list[subprocess.Popen[str]] = []


def start(cwd: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Starts tfdistrun in the folder `cwd`."""
    process = subprocess.Popen(
        [*TFDISTRUN, *arguments],
        cwd=cwd,
        env=clean_environment(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_hangups,
    )
    _started.append(process)
    return process


def kill_started() -> None:
    """Kills all processes of the jobs of `start` that still run."""
    for process in _started:
        if process.poll() is None:
            for one in _stopped(psutil.Process(process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait(10.0)
    _started.clear()


def _stopped(process: psutil.Process) -> list[psutil.Process]:
    """The process and all it has started, stopped: none starts another meanwhile."""
    ended = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        process.suspend()
        until(lambda: process.status() in ended)
        children = process.children()
    except psutil.NoSuchProcess:
        return []
    return [process, *(one for child in children for one in _stopped(child))]


def _hear_hangups() -> None:
    """The tests themselves may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], timeout_s: float = 30.0) -> Run:
    """Waits for the end; aborts it, and fails, when it does not come.

    The limit is for an idle machine (see `PATIENCE`).
    """
    before = time.monotonic()
    limit_s = PATIENCE * timeout_s
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        left = "\n".join(f"{child}" for child in children)
        process.send_signal(signal.SIGABRT)
        stdout, stderr = process.communicate(timeout=10.0)
        raise AssertionError(
            f"tfdistrun did not end in {limit_s:g} s:\n{stdout}\n{stderr}\n{left}"
        ) from None
    return Run(process.returncode, stdout, stderr, time.monotonic() - before)


def run(cwd: Path, *arguments: str, timeout_s: float = 30.0, **environ: str) -> Run:
    """Runs tfdistrun to its end."""
    return finish(start(cwd, *arguments, **environ), timeout_s)


def signal_until_it_ends(process: subprocess.Popen[str], number: int) -> int:
    """Sends a signal, and again after longer than what counts as one signal.

    Returns:
        How often it took.
    """
    for count in range(1, 6):
        process.send_signal(number)
        try:
            process.wait(1.5)
            return count
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it does not end")


def marked(marker: str) -> list[int]:
    """Living processes whose command line or environment holds `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            text = "\0".join(process.cmdline()) + str(process.environ())
            if marker in text and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [pid for pid in found if pid != os.getpid()]


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> float:
    """Waits until `condition()` holds; returns the seconds it took.

    Raises:
        AssertionError: it did not in time.
    """
    before = time.monotonic()
    while not condition():
        if time.monotonic() - before > timeout_s:
            raise AssertionError(f"not within {timeout_s} s")
        time.sleep(0.01)
    return time.monotonic() - before


@dataclass(frozen=True)
class Holdings:
    """What a process of a job has that must not outlive it.

    Attributes:
        ports: TCP ports of its own, and of the launcher's store.
        memory: (device, inode) of the links' shared memory.
    """

    ports: frozenset[int]
    memory: frozenset[tuple[str, str]]


def holdings() -> Holdings:
    """Those of this process."""
    sockets = psutil.Process().net_connections(kind="tcp")
    ports = {socket.laddr.port for socket in sockets}
    if store := os.environ.get("TFDIST_RENDEZVOUS"):
        ports.add(int(store.rpartition(":")[2]))
    return Holdings(frozenset(ports), frozenset(_link_memory(os.getpid())))


def left_over(job: Holdings) -> Holdings:
    """What of a job's holdings some process of this machine still has."""
    sockets = psutil.net_connections(kind="tcp")
    listening = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
    memory = {found for pid in psutil.pids() for found in _link_memory(pid)}
    return Holdings(job.ports & listening, job.memory & memory)


def _link_memory(pid: int) -> set[tuple[str, str]]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()  # it ended
    maps = [line.split() for line in lines if "memfd:tfdist-link" in line]
    return {(device, inode) for _, _, _, device, inode, *_ in maps}
