"""Rounds in which all peers take turns, kept in a file that a later run continues.

A round is the control, every peer once, and the control again. It is written when it is
complete: a run that is broken off repeats only the round in which that happened. A line
is one case of one peer, or one control, or one failure.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import machine, trial
from benchmarks.peers.catalogue import Peer

sys.path.append(str(machine.ROOT / "tests"))

from helpers.tree import tracked_files, tree_hash  # noqa: E402

CODE = ("tfdist", "tfdist_ops")
CONTROL = "control"
LEAST_S = 5.0  # with less time left, a peer is not started
NO_TIME = "no time was left for it"


@dataclass(frozen=True)
class Plan:
    """A measurement: its task, its peers and their time limit.

    Attributes:
        task: task of `measuring`, with the arguments of the worker.
        peers: those that can run here.
        timeout_s: limit for one peer in one round.
    """

    task: dict[str, Any]
    peers: Sequence[Peer]
    timeout_s: float

    def key(self, ranks: int) -> str:
        """Hash that rounds of the same plan, code and settings have in common."""
        names = [peer.name for peer in self.peers]
        code = [tree(), library(), settings()]
        said = json.dumps([self.task, names, ranks, *code], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def settings() -> dict[str, str]:
    """The environment variables that configure tfdist on the ranks."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("TFDIST_")}


def tree() -> str:
    """Hash of the sources that are measured."""
    return tree_hash(tracked_files(CODE))


def library() -> str:
    """Hash of the measured libraries, which may have been built from other sources."""
    digest = hashlib.sha256()
    for path in sorted((machine.ROOT / "tfdist" / "_native").glob("*.so")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file, none when there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def turns(peers: Sequence[Peer], number: int) -> list[Peer]:
    """The order of the peers in a round; each round begins with a different peer."""
    first = number % len(peers)
    return [*peers[first:], *peers[:first]]


def run(
    plan: Plan,
    all_ranks: Sequence[int],
    count: int,
    path: Path,
    *,
    until_s: float = math.inf,
) -> None:
    """Makes the rounds that the file does not have yet.

    Args:
        plan: what is measured.
        all_ranks: numbers of ranks; they take turns too.
        count: rounds for each of them.
        path: of the JSON lines, appended to.
        until_s: value of `time.monotonic` at which the measurement ends; peers that had
            no turn by then are reported as failed.
    """
    known = {(row["key"], row["round"]) for row in read(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        for ranks in all_ranks:
            if (plan.key(ranks), number) in known:
                print(f"round {number}, {ranks} ranks: already in the file", flush=True)
                continue
            rows = _round(plan, ranks, number, until_s)
            with path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def _round(plan: Plan, ranks: int, number: int, until_s: float) -> list[dict[str, Any]]:
    common = {
        "key": plan.key(ranks),
        "kind": plan.task["task"],
        "np": ranks,
        "round": number,
        "tree": tree(),
        "library": library(),
        "settings": settings(),
    }
    found = [_control(ranks)]
    for peer in turns(plan.peers, number):
        begin_s = time.monotonic()
        limit_s = min(plan.timeout_s, until_s - begin_s)
        if limit_s > LEAST_S:
            outcome = trial.run(peer, ranks, plan.task, limit_s)
        else:
            outcome = trial.Outcome(error=NO_TIME)
        found += _rows_of(peer, outcome)
        elapsed_s = time.monotonic() - begin_s
        head = f"round {number}, {ranks} ranks, {peer.name}, {elapsed_s:.0f} s:"
        print(head, outcome.error or _summary(outcome), flush=True)
    found.append(_control(ranks))
    return [{**common, **row} for row in found]


def _control(ranks: int) -> dict[str, Any]:
    now = round(time.time())
    described = machine.description()
    return {"peer": CONTROL, "unix": now, **described, **machine.control(ranks)}


def _rows_of(peer: Peer, outcome: trial.Outcome) -> list[dict[str, Any]]:
    now = round(time.time())
    if outcome.error:
        return [{"peer": peer.name, "unix": now, "error": outcome.error}]
    first = outcome.ranks[0]
    return [
        {
            "peer": peer.name,
            "unix": now,
            "versions": first["versions"],
            "case": case,
            "repetitions": len(all_s),
            "median_s": statistics.median(all_s),
            "best_s": min(all_s),
            "worst_s": max(all_s),
            **outcome.facts.get(case, {}),
            **_weights(outcome, case),
        }
        for case, all_s in outcome.seconds.items()
    ]


def _weights(outcome: trial.Outcome, case: str) -> dict[str, bool]:
    """Whether a training has ended with the same bits on all ranks."""
    found = {rank["weights"][case] for rank in outcome.ranks if "weights" in rank}
    return {"same_weights": len(found) == 1} if found else {}


def _summary(outcome: trial.Outcome) -> str:
    medians = {c: statistics.median(all_s) for c, all_s in outcome.seconds.items()}
    return ", ".join(f"{case} {1e3 * s:.4g} ms" for case, s in medians.items())
