"""Cost of a timeline: ResNet-50's gradients with and without TFDIST_TIMELINE.

    python benchmarks/timeline.py [--ranks 2] [--rounds 7] [--steps 30]

Two jobs of core clients (commit_gate.py) live side by side and make their steps in
turn, one at a time. A step is the reduction alone. The share of a training step is
smaller, because the timeline does not touch its forward and backward pass.

Reported: for each round the ratio of the median steps, and the median of these ratios;
how much a copy of memory, the control, varied; the bytes of the timeline for a step of
a rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from commit_gate import WARM_STEPS, jobs
from control import Copier

from tfdist.core.timeline import merging


def measure(size: int, rounds: int, steps: int, folder: str) -> list[float]:
    """Returns for each round the median step with a timeline over that without."""
    ratios, control = [], []
    copier = Copier()
    with jobs(size, {"TFDIST_TIMELINE": folder}) as both:
        for job in both:
            job.steps(WARM_STEPS)
        for number in range(rounds):
            control.append(copier.gib_s())
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(steps):
                for which in (0, 1) if turn % 2 else (1, 0):
                    times[which].append(both[which].steps(1))
            plain_ms, traced_ms = (statistics.median(t) * 1e3 for t in times)
            ratios.append(traced_ms / plain_ms)
            print(
                f"  round {number + 1}: {plain_ms:7.2f} ms without, "
                f"{traced_ms:7.2f} ms with, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    spread = max(control) / min(control) - 1
    print(f"the control varied by {spread:.0%}")
    return ratios


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a job")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=30, help="steps a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tfdist-timeline-") as folder:
        ratios = measure(options.ranks, options.rounds, options.steps, folder)
        steps = options.ranks * (options.rounds * options.steps + WARM_STEPS)
        size = merging.bytes_in(Path(folder)) / steps
    print(
        f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds; "
        f"{size:.0f} bytes a step and rank"
    )


if __name__ == "__main__":
    main()
