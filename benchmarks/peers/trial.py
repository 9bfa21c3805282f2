"""Runs one peer once, within a deadline, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from benchmarks.peers.catalogue import TRAINING, WORKERS, Peer
from benchmarks.peers.machine import ROOT, loops

sys.path.append(str(ROOT / "tests"))

from helpers.ports import free_ports  # noqa: E402

MARK = "PEERS_TRIAL"  # in the environment of all that a trial starts
LAST_LINES = 15
CHATTER = re.compile(r"[IW]\d{4} |WARNING: All log messages before")  # of TensorFlow
NOT_STARTED = 127  # as a shell has it
# For all peers alike: no rank is pinned, and one thread computes on each.
COMMON = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONDONTWRITEBYTECODE": "1",
}
FOREIGN = ("OMPI_", "PMI", "I_MPI_", "HOROVOD_", "PYTHON", "LD_", "TF_")


@dataclass(frozen=True)
class Outcome:
    """The results of a trial.

    Attributes:
        seconds: for each case the times that `merged` computes from those of the ranks.
        facts: for each case further figures, the means over the ranks.
        ranks: all that each rank has written.
        error: why there are no results, with the last lines of the log; else empty.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def commands(
    peer: Peer, worker: str, ranks: int, task: Path, ports: list[int]
) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start: arguments and what is added to their environment."""
    own = [str(peer.python), str(WORKERS / worker), str(task)]
    return launched(peer, own, ranks, ports)


def launched(
    peer: Peer, own: list[str], ranks: int, ports: list[int]
) -> list[tuple[list[str], dict[str, str]]]:
    """The processes that start `own`, a command line, once for each rank."""
    python = str(peer.python)
    count = ["-np", str(ranks)]
    if peer.launcher == "tfdistrun":
        start = [python, "-m", "tfdist.launch"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        return [([*start, *count, *peer.options, *own], {"PYTHONPATH": path})]
    if peer.launcher == "env":
        common = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "PEERS_PORTS": ",".join(map(str, ports)),
        }
        return [
            (own, {**common, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(ranks)
        ]
    return [([peer.program, *peer.options, *count, *own], {})]


def run(peer: Peer, ranks: int, task: dict[str, Any], timeout_s: float) -> Outcome:
    """Starts a peer's ranks, waits for their results, and ends all of them."""
    peer = replace(peer, environ={**peer.environ, **task.get("environ", {})})
    with tempfile.TemporaryDirectory(prefix="tfdist-peer-") as folder:
        path = Path(folder, "task.json")
        own = {"folder": folder, "loops": str(loops()), **peer.settings}
        path.write_text(json.dumps({**task, **own}))
        worker = peer.workers[task["task"]]
        with open(Path(folder, "log"), "w+") as log:
            starts = commands(peer, worker, ranks, path, free_ports(ranks))
            code = ended(peer, starts, Path(folder), log, timeout_s)
            found = [Path(folder, f"rank{rank}.json") for rank in range(ranks)]
            if code is None or not all(one.exists() for one in found):
                return Outcome(error=failure(log, code, timeout_s))
            left = [json.loads(one.read_text()) for one in found]
    return merged(task["task"], left)


def ended(
    peer: Peer,
    starts: list[tuple[list[str], dict[str, str]]],
    folder: Path,
    log: TextIO,
    timeout_s: float,
) -> int | None:
    """Starts processes in `folder`, waits for them, and ends all that they started.

    Returns:
        Exit code of the first process that failed, 0 if none did; None: time is over.
    """
    identity = uuid.uuid4().hex
    try:
        return _run(peer, starts, folder, identity, log, timeout_s)
    finally:
        _end(identity)


def _run(
    peer: Peer,
    starts: list[tuple[list[str], dict[str, str]]],
    folder: Path,
    identity: str,
    log: TextIO,
    timeout_s: float,
) -> int | None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    kept["PATH"] = os.pathsep.join([str(peer.folder), kept["PATH"]])
    deadline_s = time.monotonic() + timeout_s
    try:
        processes = [
            subprocess.Popen(
                arguments,
                env={**kept, **COMMON, **peer.environ, **added, MARK: identity},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )
            for arguments, added in starts
        ]
    except OSError as error:
        log.write(f"{error}\n")
        return NOT_STARTED
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        time.sleep(0.02)
    return None


def _end(identity: str) -> None:
    """Kills what a trial has started, wherever it has gone, until nothing is left."""
    for _ in range(50):
        left = [p for p in psutil.process_iter() if _belongs(p, identity)]
        for process in left:
            try:
                process.kill()
            except psutil.Error:  # gone
                continue
        if not left:
            return
        psutil.wait_procs(left, timeout=0.2)


def _belongs(process: psutil.Process, identity: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK) == identity
    except (psutil.Error, OSError):
        return False


def failure(log: TextIO, code: int | None, timeout_s: float) -> str:
    """The error of a run that has failed, with the last lines of its log."""
    log.seek(0)
    lines = [line.rstrip() for line in log if line.strip() and not CHATTER.match(line)]
    what = f"not within {timeout_s:g} s" if code is None else f"exit code {code}"
    return "\n".join([what, *lines[-LAST_LINES:]])


def merged(task: str, ranks: list[dict[str, Any]]) -> Outcome:
    """Merges the results of the ranks into one outcome.

    A repetition of a collective takes as long as its slowest rank. Steps of a training
    are averaged by rate, which is right for ranks that do not wait for each other, too:
    N ranks with steps of s_r seconds are as fast as N ranks with the harmonic mean.
    """
    merge = _mean_step if task == TRAINING else _slowest
    seconds = {
        case: merge([rank["seconds"][case] for rank in ranks])
        for case in ranks[0]["seconds"]
    }
    known = ranks[0].get("facts", {})
    facts = {
        case: {
            name: statistics.mean(rank["facts"][case][name] for rank in ranks)
            for name in known[case]
        }
        for case in known
    }
    return Outcome(seconds, facts, ranks)


def _slowest(ranks: list[list[float]]) -> list[float]:
    return [max(times) for times in zip(*ranks, strict=True)]


def _mean_step(ranks: list[list[float]]) -> list[float]:
    return [statistics.harmonic_mean([statistics.median(times) for times in ranks])]
