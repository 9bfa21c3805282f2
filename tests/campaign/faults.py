"""The faults of the campaigns, one function each: from a seed to a row of figures.

A row has "ok"; when it is false, "why". Seconds are from the fault to the moment a
survivor's operation returned with the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign.trial import Job

SIZE = 4
HANG_S = 15.0  # past it, a survivor counts as hanging
MAX_WAIT_S = 0.4  # a fault comes at most this long after the ranks are ready
CLONE_NEWNET = 0x40000000


def _judge(job: Job, victims: set[int], began_s: float) -> dict[str, Any]:
    """Checks that all survivors ended with the same verdict, naming a victim."""
    survivors = [r for r in range(len(job.children)) if r not in victims]
    hanging = job.wait("end", survivors, HANG_S)
    if hanging:
        return {"ok": False, "why": f"hang of ranks {hanging}", "hang": True}
    ends = [job.children[r].word("end") or {} for r in survivors]
    verdicts = {(e["code"], e["message"]) for e in ends}
    named = {e["payload"].get("rank") for e in ends}
    applied = {e["applied"] for e in ends}
    row = {
        "detected_s": [round(e["time_s"] - began_s, 4) for e in ends],
        "applied_spread": max(applied) - min(applied),
    }
    if len(verdicts) != 1:
        return {**row, "ok": False, "why": f"verdicts differ: {sorted(verdicts)}"}
    if len(named) != 1 or not named <= victims:
        return {**row, "ok": False, "why": f"named {named}, victims {victims}"}
    return {**row, "ok": True}


def kill(seed: int, *, gate: bool = False) -> dict[str, Any]:
    """SIGKILL of a random rank at a random instant. With the gate: equal steps too."""
    random_ = random.Random(seed)
    environ = {"TFDIST_ATOMIC_STEPS": "1"} if gate else {}
    with Job(SIZE, seed, environ) as job:
        job.ready()
        time.sleep(random_.uniform(0.0, MAX_WAIT_S))
        victim = random_.randrange(SIZE)
        row = _judge(job, {victim}, job.kill(victim, signal.SIGKILL))
    if gate and row["ok"] and row["applied_spread"] != 0:
        return {**row, "ok": False, "why": "survivors applied different steps"}
    return {**row, "victim": victim}


def kill_gated(seed: int) -> dict[str, Any]:
    """As `kill`, with TFDIST_ATOMIC_STEPS=1: no survivor is a step ahead."""
    return kill(seed, gate=True)


def stop(seed: int) -> dict[str, Any]:
    """SIGSTOP of a random rank; continued after the verdict, it must not go on."""
    random_ = random.Random(seed)
    with Job(SIZE, seed, {}) as job:
        job.ready()
        time.sleep(random_.uniform(0.0, MAX_WAIT_S))
        victim = random_.randrange(SIZE)
        row = _judge(job, {victim}, job.kill(victim, signal.SIGSTOP))
        job.kill(victim, signal.SIGCONT)
        if row["ok"]:
            late = job.wait("end", [victim], HANG_S)
            end = job.children[victim].word("end")
            if late or end is None or end["code"] == 0:
                row = {**row, "ok": False, "why": f"the evicted rank goes on: {end}"}
    return {**row, "victim": victim}


def pause(seed: int) -> dict[str, Any]:
    """SIGSTOP for a moment that is shorter than the limit: nobody may fail."""
    random_ = random.Random(seed)
    with Job(SIZE, seed, {}) as job:
        job.ready()
        victim = random_.randrange(SIZE)
        job.kill(victim, signal.SIGSTOP)
        time.sleep(random_.uniform(0.05, 0.5))
        job.kill(victim, signal.SIGCONT)
        still = job.wait("end", range(SIZE), 2.0)
        failed = sorted(set(range(SIZE)) - set(still))
    return {"ok": not failed, "why": f"ranks {failed} failed" if failed else ""}


def overload(seed: int, seconds: float) -> dict[str, Any]:
    """Four busy processes for each core beside the ranks: nobody may be suspected."""
    burners = [
        # Busy as long as this process lives, which may be killed.
        subprocess.Popen(
            ["sh", "-c", "while kill -0 $PPID; do :; done"], stderr=subprocess.DEVNULL
        )
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        with Job(SIZE, seed, {}) as job:
            job.ready()
            late = job.wait("end", range(SIZE), seconds)
            failed = sorted(set(range(SIZE)) - set(late))
            said = [job.children[r].word("end") for r in failed]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    return {
        "ok": not failed,
        "why": f"false verdicts: {said}" if failed else "",
        "seconds": seconds,
    }


# ---- two hosts: network namespaces with a cable between them ----


@dataclass(frozen=True)
class Cable:
    """Two namespaces, `names`, joined by a pair of interfaces."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def cut(self) -> None:
        """Pulls the cable: both ends stay silent, nobody is told."""
        _ip("-n", self.names[0], "link", "set", "cable", "down")


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, timeout=10, capture_output=True, text=True
    )


def can_make_namespaces() -> bool:
    """Whether this process is root and the `ip` program exists."""
    return os.geteuid() == 0 and Path("/sbin/ip").exists()


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Two hosts, as far as a network is concerned."""
    tag = secrets.token_hex(3)
    names = (f"tfd{tag}a", f"tfd{tag}b")
    addresses = ("10.213.77.1", "10.213.77.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            *("link", "add", "cable", "netns", names[0]),
            *("type", "veth", "peer", "name", "cable", "netns", names[1]),
        )
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Cable(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _enter(name: str) -> None:
    with open(f"/var/run/netns/{name}", "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


def cut(seed: int) -> dict[str, Any]:
    """Two ranks on each of two hosts; the cable between them is pulled.

    The side of rank 0 gets a verdict that names a rank of the other side; the other
    side ends too, with the error of those who are not the majority.
    """
    random_ = random.Random(seed)
    with cable() as wire, tempfile.NamedTemporaryFile() as secret:
        os.chmod(secret.name, 0o600)
        secret.write(secrets.token_bytes(32))
        secret.flush()

        def placement(rank: int) -> dict[str, str]:
            return {
                "TFDIST_LOCAL_RANK": str(rank % 2),
                "TFDIST_LOCAL_SIZE": "2",
                "TFDIST_CROSS_RANK": str(rank // 2),
                "TFDIST_CROSS_SIZE": "2",
                "TFDIST_ADDRESS": wire.addresses[rank // 2],
                "TFDIST_RENDEZVOUS": f"{wire.addresses[0]}:29511",
                "TFDIST_SECRET_FILE": secret.name,
            }

        def enter(rank: int) -> None:
            _enter(wire.names[rank // 2])

        with Job(SIZE, seed, {}, enter=enter, placement=placement) as job:
            job.ready()
            time.sleep(random_.uniform(0.0, MAX_WAIT_S))
            began_s = time.monotonic()
            wire.cut()
            row = _judge(job, {2, 3}, began_s)
            late = job.wait("end", [2, 3], HANG_S)
            if late:
                return {**row, "ok": False, "why": f"hang of {late}", "hang": True}
            ends = [job.children[r].word("end") or {} for r in (2, 3)]
            row["others_s"] = [round(e["time_s"] - began_s, 4) for e in ends]
            if row["ok"] and any(e["code"] == 0 for e in ends):
                row = {**row, "ok": False, "why": "the other side goes on"}
    return row
