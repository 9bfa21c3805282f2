"""What the commit gate costs: ResNet-50's gradients with it and without it.

    python benchmarks/commit_gate.py [--ranks 2] [--rounds 7] [--steps 10]

Two jobs of core clients (no TensorFlow) live side by side, one with
TFDIST_COMMIT_GATE=1; in every round each makes `--steps` steps, in turn first. A step
is the reduction alone, without a backward pass to hide it: the gate's share of a real
step is smaller. Reported: the median of the rounds' ratios, and how much a copy of
memory varied meanwhile.
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import core_client  # noqa: E402
from resnet50 import gradient_shapes  # noqa: E402

from tfdist import _core, _runtime  # noqa: E402
from tfdist.buckets import cut_buckets  # noqa: E402

TIMEOUT_S = 120.0
WARM_STEPS = 3


class Rank:
    """One rank's gradients and how it reduces them."""

    def __init__(self) -> None:
        _runtime.start()
        shapes = gradient_shapes()
        self._gradients = [np.ones(shape, np.float32) for shape in shapes]
        rows = _core.config()
        self._buckets = cut_buckets(
            [gradient.nbytes for gradient in self._gradients],
            ["float32"] * len(shapes),
            first_bytes=rows["TFDIST_FIRST_BUCKET_BYTES"]["value"],
            bucket_bytes=rows["TFDIST_BUCKET_BYTES"]["value"],
            fusion_bytes=rows["TFDIST_FUSION_BYTES"]["value"],
        )
        lines = [f"w{i} float32 {list(shape)}" for i, shape in enumerate(shapes)]
        text = "\n".join([*lines, "op=average"]).replace(", ", ",")
        self._group, _ = _core.register_group(text, [True] * len(shapes))

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

    def __init__(self, size: int, gate: bool) -> None:
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
                    TFDIST_COMMIT_GATE=str(int(gate)),
                )
                os.close(command)
                os.close(answer)
                _serve(hear, say)
            os.close(hear)
            os.close(say)
            self._ranks.append((pid, command, answer))

    def steps(self, count: int) -> float:
        """Seconds a step, of the slowest rank."""
        for _, command, _ in self._ranks:
            os.write(command, bytes([count]))
        answers = [os.read(answer, 64) for _, _, answer in self._ranks]
        if not all(answers):
            raise RuntimeError("a rank has ended; its error stands above")
        return max(float(answer) for answer in answers) / count

    def end(self) -> None:
        """Lets the ranks go."""
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
        _runtime.shutdown()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


@contextlib.contextmanager
def _jobs(size: int) -> Iterator[tuple[Job, Job]]:
    jobs = (Job(size, gate=False), Job(size, gate=True))
    try:
        yield jobs
    finally:
        for job in reversed(jobs):  # the later one's ranks hold ends of the first one's
            job.end()


class Copier:
    """The control: copies of 64 MiB between two buffers that are in memory already."""

    def __init__(self) -> None:
        self._source = np.ones(64 << 20, np.uint8)
        self._target = self._source.copy()

    def gib_s(self) -> float:
        """The best of five copies."""
        best_s = math.inf
        for _ in range(5):
            begin_s = time.monotonic()
            np.copyto(self._target, self._source)
            best_s = min(best_s, time.monotonic() - begin_s)
        return self._source.nbytes / best_s / 2**30


def measure(size: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Ratios (with the gate / without it) and control speeds, one a round."""
    ratios, control = [], []
    copier = Copier()
    with _jobs(size) as (plain, gated):
        plain.steps(WARM_STEPS)
        gated.steps(WARM_STEPS)
        for number in range(rounds):
            control.append(copier.gib_s())
            if number % 2 == 0:
                plain_s, gated_s = plain.steps(steps), gated.steps(steps)
            else:
                gated_s, plain_s = gated.steps(steps), plain.steps(steps)
            ratios.append(gated_s / plain_s)
            print(
                f"  round {number + 1}: {plain_s * 1e3:7.2f} ms without, "
                f"{gated_s * 1e3:7.2f} ms with, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    return ratios, control


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a job")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=10, help="steps a round, <= 255")
    options = parser.parse_args()
    numbers = sum(math.prod(shape) for shape in gradient_shapes())
    print(f"{numbers * 4 / 2**20:.0f} MiB of gradients, {options.ranks} ranks")
    ratios, control = measure(options.ranks, options.rounds, options.steps)
    spread = max(control) / min(control) - 1
    print(
        f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds; "
        f"the control varied by {spread:.0%}"
    )


if __name__ == "__main__":
    main()
