"""The quick set: a sample of everything in five minutes, with whatever is built."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import catalogue, report, rounds
from benchmarks.peers.catalogue import GRADIENTS, SIZES, TRAINING

LIMIT_S = 270.0  # of all measuring
PEER_S = 45.0  # of one peer in one round
RANKS = 2
OUT = Path("build", "peers", "quick.jsonl")


@dataclass(frozen=True)
class Part:
    """One task, its peers, and the share of LIMIT_S after which it has to end."""

    task: dict[str, Any]
    peers: str
    until: float


def parts(shapes: list[tuple[int, ...]]) -> list[Part]:
    """The parts in their order; time that a part leaves is available to the next one.

    Args:
        shapes: of the list of gradients.
    """
    sizes = [1 << 10, 256 << 10, 16 << 20, 64 << 20]
    models = {"models": ["cnn", "mlp"], "warm": 4, "steps": 8, "batch": 32}
    below = "tfdist-core,impi,ompi5,torch-gloo"  # they start quickly
    return [
        Part(
            {"task": SIZES, "cap_s": 0.2, "sizes": sizes},
            f"{below},mpich5,tfdist,hvd-gloo,tf-ring,hvd-mpi",
            0.4,
        ),
        Part(
            {"task": GRADIENTS, "cap_s": 0.3, "shapes": shapes},
            f"{below},tfdist,hvd-gloo,tf-ring",
            0.7,
        ),
        Part(
            {"task": TRAINING, **models},
            "tfdist,alone,hvd-gloo,torch-gloo,tf-ring",
            1.0,
        ),
    ]


def run(shapes: list[tuple[int, ...]]) -> str:
    """Measures one round of everything; returns the report and the missing peers."""
    begin_s = time.monotonic()
    OUT.unlink(missing_ok=True)
    missing: dict[str, str] = {}
    for part in parts(shapes):
        peers = catalogue.chosen(part.peers, part.task["task"])
        present, absent = catalogue.split(peers)
        missing.update(absent)
        plan = rounds.Plan(part.task, present, PEER_S)
        until_s = begin_s + part.until * LIMIT_S
        rounds.run(plan, [RANKS], 1, OUT, until_s=until_s)
    lines = [f"- {name}: {reason}" for name, reason in missing.items()]
    whole = ["## Missing\n\n" + "\n".join(lines)] if lines else []
    note = "One round is only a rough comparison: see docs/benchmarks.md."
    return "\n\n".join([report.text([OUT]), *whole, note])
