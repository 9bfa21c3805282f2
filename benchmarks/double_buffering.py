"""Double buffering between hosts with slow lines; needs root.

    sudo python benchmarks/double_buffering.py [--rounds 7] [--ratios 1.1,2]

Four hosts (network namespaces, shaped_hosts.py) with one rank and a line of 100 Mbit/s
each reduce 2 MB of float32 gradients in each step. The computation of a step is a
sleep, all of it before the first gradient, so that a synchronous step hides nothing: it
takes the time of the computation plus that of the reduction. The ratio r is the time of
a float32 reduction over that of the computation; the sleep is chosen for it.

Measured are steps of a `tf.function` with `DistributedGradientTape`: synchronous and
with double buffering, in float32 and with compression="fp16". In each round all four
run in turn. Reported are the medians of the rounds' ratios: a variant's speed over that
of synchronous float32, and its efficiency, the time of the computation over that of the
step. At best, a step with double buffering takes max(1, r') times the computation,
where r' is the ratio r of the variant's own reduction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from networks import Contender, environments, secret_file
from shaped_hosts import ShapedHosts, shaped_hosts, why_not

HOSTS, MBIT_S = 4, 100.0
VARIABLES, ELEMENTS = 8, 62_500  # 2 MB of float32
STEPS = 8
VARIANTS = {
    "synchronous, float32": {},
    "synchronous, fp16": {"compression": "fp16"},
    "double buffering, float32": {"double_buffering": True},
    "double buffering, fp16": {"double_buffering": True, "compression": "fp16"},
}


class Rank:
    """One rank, with a step for each variant."""

    def __init__(self) -> None:
        import tensorflow as tf

        import tfdist

        tfdist.init()
        self._sleep_s = 0.0
        self._barrier = tfdist.barrier
        self._steps = {}
        for name, options in VARIANTS.items():
            variables = [
                tf.Variable(tf.zeros(ELEMENTS), name=f"v{i}") for i in range(VARIABLES)
            ]
            self._steps[name] = self._step_of(tf, tfdist, name, variables, options)

    def _step_of(
        self, tf: Any, tfdist: Any, name: str, variables: list[Any], options: Any
    ) -> Any:
        def compute(x: Any) -> Any:
            time.sleep(self._sleep_s)
            return x

        @tf.function
        def step() -> None:
            one = tf.ensure_shape(tf.numpy_function(compute, [1.0], tf.float32), [])
            with tfdist.DistributedGradientTape(
                name=name.replace(", ", "-"), **options
            ) as tape:
                loss = tf.add_n([tf.reduce_sum(v * one) for v in variables])
            for v, grad in zip(variables, tape.gradient(loss, variables), strict=True):
                v.assign_sub(0.125 * grad)

        return step

    def seconds(self, name: str, sleep_s: float, steps: int) -> float:
        """Returns the mean time of `steps` steps, after one that is not counted."""
        self._sleep_s = sleep_s
        step = self._steps[name]
        step()
        self._barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin_s) / steps


def serve() -> None:
    """Answers the requests of the main process, on one rank."""
    rank = Rank()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.seconds(*json.loads(line))), flush=True)


class Ranks:
    """The processes of all ranks."""

    def __init__(self, network: ShapedHosts, folder: Path) -> None:
        contender = Contender("double buffering", tuple(range(HOSTS)))
        worlds = environments(network, contender, secret_file(folder))
        self._processes = [
            subprocess.Popen(
                [*network.inside(host), sys.executable, __file__, "--rank"],
                env=environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host, environ in enumerate(worlds)
        ]
        for process in self._processes:
            if _line_of(process) != "ready":
                raise RuntimeError("Expected 'ready' as the first line of a rank.")

    def seconds(self, name: str, sleep_s: float, steps: int = STEPS) -> float:
        """Returns the time of a step on the slowest rank."""
        for process in self._processes:
            print(json.dumps([name, sleep_s, steps]), file=process.stdin, flush=True)
        return max(float(_line_of(process)) for process in self._processes)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def _line_of(process: Any) -> str:
    line: str = process.stdout.readline()
    if not line:
        raise RuntimeError(f"A rank ended with {process.wait()}.")
    return line.strip()


def measure(ranks: Ranks, ratio: float, rounds: int) -> dict[str, Any]:
    """Measures all variants at one ratio of reduction to computation."""
    first = next(iter(VARIANTS))
    for name in VARIANTS:
        ranks.seconds(name, 0.0)  # traces, connects
    reduction_s = statistics.median(ranks.seconds(first, 0.0) for _ in range(5))
    compute_s = reduction_s / ratio
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds):
        names = list(VARIANTS)
        for name in names[turn % 4 :] + names[: turn % 4]:
            found[name].append(ranks.seconds(name, compute_s))
    rows = {}
    for name, seconds in found.items():
        speedups = [a / b for a, b in zip(found[first], seconds, strict=True)]
        rows[name] = {
            "ms": round(1e3 * statistics.median(seconds), 1),
            "speedup": round(statistics.median(speedups), 3),
            "speedup_min_max": [round(min(speedups), 3), round(max(speedups), 3)],
            "efficiency": round(compute_s / statistics.median(seconds), 3),
        }
    return {
        "ratio": ratio,
        "reduction_ms": round(1e3 * reduction_s, 1),
        "compute_ms": round(1e3 * compute_s, 1),
        "rounds": rounds,
        "variants": rows,
    }


def main(arguments: Sequence[str]) -> None:
    """Measures, and prints a JSON line for each ratio.

    Raises:
        SystemExit: this machine cannot make network namespaces.
    """
    parser = argparse.ArgumentParser(description="Double buffering on slow lines.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ratios", default="1.1,2")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.rank:
        return serve()
    reason = why_not()
    if reason:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(HOSTS, MBIT_S) as hosts:
        ranks = Ranks(hosts, Path(folder))
        try:
            for ratio in flags.ratios.split(","):
                row = measure(ranks, float(ratio), flags.rounds)
                print(json.dumps(row), flush=True)
        finally:
            ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
