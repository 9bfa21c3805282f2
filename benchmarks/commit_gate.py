"""Cost of the commit gate: ResNet-50's gradients with it and without it.

    python benchmarks/commit_gate.py [--ranks 2] [--rounds 7] [--steps 30] [--free]

Two jobs of core clients (no TensorFlow) live side by side, one with
TFDIST_ATOMIC_STEPS=1, and make their steps in turn, `--steps` each in a round. A step
is the reduction alone, without a backward pass to hide it: the gate's share of a real
step is smaller. All ranks begin a step together, as the ranks of a training job come to
the end of their backward passes together, and it lasts until the slowest has all of it.

With `--free` no rank waits between two steps of a round. Without the gate, a rank then
reduces the next step while others still read the end of this one. The gate does not
allow this, nor does training: the next gradients need the weights of this step. The
ratio is therefore an upper bound of the gate's cost.

Reported: the median of the rounds' ratios, and how much a copy of memory varied.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from control import Copier  # noqa: E402
from helpers import core_client  # noqa: E402
from resnet50 import gradient_shapes  # noqa: E402

from tfdist.core import native, world  # noqa: E402
from tfdist.gradients.bucketing import cut_buckets  # noqa: E402

TIMEOUT_S = 120.0
WARM_STEPS = 3


class Rank:
    """One rank's gradients and how it reduces them."""

    def __init__(self) -> None:
        world.start()
        shapes = gradient_shapes()
        self._gradients = [np.ones(shape, np.float32) for shape in shapes]
        rows = native.config()
        self._buckets = cut_buckets(
            [gradient.nbytes for gradient in self._gradients],
            ["float32"] * len(shapes),
            first_bytes=rows["TFDIST_FIRST_BUCKET_BYTES"]["value"],
            bucket_bytes=rows["TFDIST_BUCKET_BYTES"]["value"],
            fusion_bytes=rows["TFDIST_FUSION_BYTES"]["value"],
        )
        lines = [f"w{i} float32 {list(shape)}" for i, shape in enumerate(shapes)]
        text = "\n".join([*lines, "op=average"]).replace(", ", ",")
        self._group, _ = native.register_gradient_list(text, [True] * len(shapes))

    def step(self) -> None:
        """Hands over all buckets, then waits for all."""
        pending = [
            core_client.submit(
                [self._gradients[i] for i in bucket],
                name=f"gradients/{number}",
                op=core_client.AVERAGE,
                group=self._group,
                bucket=number,
                bucket_count=len(self._buckets),
                in_place=True,
            )
            for number, bucket in enumerate(self._buckets)
        ]
        for one in pending:
            one.wait(TIMEOUT_S)


class Job:
    """Forked ranks that make steps on command."""

    def __init__(self, size: int, variables: Mapping[str, str]) -> None:
        job = uuid.uuid4().hex
        self._ranks: list[tuple[int, int, int]] = []
        for rank in range(size):
            hear, command = os.pipe()
            answer, say = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    TFDIST_RANK=str(rank),
                    TFDIST_SIZE=str(size),
                    TFDIST_LOCAL_RANK=str(rank),
                    TFDIST_LOCAL_SIZE=str(size),
                    TFDIST_JOB_ID=job,
                    **variables,
                )
                os.close(command)
                os.close(answer)
                _serve(hear, say)
            os.close(hear)
            os.close(say)
            self._ranks.append((pid, command, answer))

    def steps(self, count: int) -> float:
        """Seconds that `count` steps without a pause take the slowest rank."""
        for _, command, _ in self._ranks:
            os.write(command, bytes([count]))
        answers = [os.read(answer, 64) for _, _, answer in self._ranks]
        if not all(answers):
            raise RuntimeError("a rank has ended; its error stands above")
        return max(float(answer) for answer in answers)

    def end(self) -> None:
        """Ends the ranks."""
        for _, command, _ in self._ranks:
            os.close(command)
        for pid, _, answer in self._ranks:
            os.waitpid(pid, 0)
            os.close(answer)


def _serve(hear: int, say: int) -> None:
    """The life of a forked rank."""
    code = 1
    try:
        rank = Rank()
        while order := os.read(hear, 1):
            begin_s = time.monotonic()
            for _ in range(order[0]):
                rank.step()
            os.write(say, repr(time.monotonic() - begin_s).encode())
        world.shutdown()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


@contextlib.contextmanager
def jobs(size: int, variables: Mapping[str, str]) -> Iterator[tuple[Job, Job]]:
    """Two jobs, without `variables` and with them."""
    both = (Job(size, {}), Job(size, variables))
    try:
        yield both
    finally:
        for job in reversed(both):  # the second job holds pipes of the first
            job.end()


def measure(
    size: int, rounds: int, steps: int, free: bool
) -> tuple[list[float], list[float]]:
    """Ratios (with the gate / without it) and control speeds, one a round."""
    ratios, control = [], []
    copier = Copier()
    at_once = steps if free else 1
    with jobs(size, {"TFDIST_ATOMIC_STEPS": "1"}) as (plain, gated):
        plain.steps(WARM_STEPS)
        gated.steps(WARM_STEPS)
        for number in range(rounds):
            control.append(copier.gib_s())
            plain_s, gated_s = 0.0, 0.0
            for turn in range(number, number + steps // at_once):
                if turn % 2 == 0:
                    plain_s += plain.steps(at_once)
                    gated_s += gated.steps(at_once)
                else:
                    gated_s += gated.steps(at_once)
                    plain_s += plain.steps(at_once)
            ratios.append(gated_s / plain_s)
            print(
                f"  round {number + 1}: {plain_s / steps * 1e3:7.2f} ms without, "
                f"{gated_s / steps * 1e3:7.2f} ms with, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    return ratios, control


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a job")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=30, help="steps a round, <= 255")
    parser.add_argument("--free", action="store_true", help="no wait between two steps")
    options = parser.parse_args()
    numbers = sum(math.prod(shape) for shape in gradient_shapes())
    print(f"{numbers * 4 / 2**20:.0f} MiB of gradients, {options.ranks} ranks")
    ratios, control = measure(
        options.ranks,
        options.rounds,
        options.steps,
        options.free,
    )
    spread = max(control) / min(control) - 1
    print(
        f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds; "
        f"the control varied by {spread:.0%}"
    )


if __name__ == "__main__":
    main()
