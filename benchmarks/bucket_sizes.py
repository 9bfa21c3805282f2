"""Effect of the size of the buckets (TFDIST_BUCKET_BYTES) on the time of a step.

    python benchmarks/bucket_sizes.py                  # two ranks on one host
    sudo python benchmarks/bucket_sizes.py --mbit 5000 # on two hosts, 5 Gbit/s

Two ranks compute the gradients of ResNet-50 on small pictures, 102 MB a step in about
0.17 s, and average them, with buckets of each size in turns within each round. Reported
are medians over the rounds, on rank 0: of the time of a step, of its ratio to the first
size, and of the time that it waited for its gradients (docs/progress.md). The hosts are
network namespaces (shaped_hosts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
DEADLINE_S = 600.0


def make_step() -> Callable[[], Any]:
    """Forward and backward pass of one batch, gradients averaged; no update."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.set_random_seed(1)
    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10
    )
    pictures, classes = tf.random.normal((4, 32, 32, 3)), tf.constant([1, 2, 3, 4])
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def step() -> Any:
        with tfdist.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(classes, model(pictures, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return step


def measure(sizes: list[int], rounds: int, steps: int) -> None:
    """One rank: prints a row for each size, on rank 0."""
    import tensorflow as tf

    import tfdist
    from tfdist.core import native
    from tfdist.core.timeline import exposed_communication

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    step = make_step()
    calls: dict[int, Any] = {}
    found: dict[int, list[tuple[float, float]]] = {}
    rank = 0
    for _ in range(rounds):
        for size_bytes in sizes:
            os.environ["TFDIST_BUCKET_BYTES"] = str(size_bytes)
            tfdist.init()
            rank = tfdist.rank()
            call = calls.setdefault(size_bytes, tf.function(step))
            call()
            call()
            tfdist.barrier(name="begin")
            native.take_records()
            begin_s = time.perf_counter()
            for _ in range(steps):
                call()
            step_s = (time.perf_counter() - begin_s) / steps
            exposed_s = (
                1e-6 * exposed_communication.exposed_us(native.take_records()) / steps
            )
            found.setdefault(size_bytes, []).append((step_s, exposed_s))
            tfdist.shutdown()
    for size_bytes, times in found.items() if rank == 0 else ():
        step_s, exposed_s = map(statistics.median, zip(*times, strict=True))
        pairs = zip(times, found[sizes[0]], strict=True)
        ratio = statistics.median(one[0] / first[0] for one, first in pairs)
        row = {
            "bucket_mib": size_bytes / MIB,
            "step_ms": round(1e3 * step_s, 1),
            "over_first": round(ratio, 3),
            "exposed_ms": round(1e3 * exposed_s, 1),
        }
        print(json.dumps(row), flush=True)


def on_two_hosts(mbit: float, command: list[str]) -> int:
    """Runs a rank on each of two hosts; returns an exit code."""
    from networks import Contender, environments, secret_file
    from shaped_hosts import shaped_hosts

    with (
        shaped_hosts(2, mbit) as network,
        tempfile.TemporaryDirectory() as folder,
    ):
        secret = secret_file(Path(folder))
        worlds = environments(network, Contender("", (0, 1)), secret)
        ranks = [
            subprocess.Popen([*network.inside(host), *command], env=environ)
            for host, environ in enumerate(worlds)
        ]
        try:
            return max(rank.wait(timeout=DEADLINE_S) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> int:
    """Measures and prints; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, help="line in Mbit/s; default: one host")
    parser.add_argument("--sizes", default="8,1,2,4,16,64", help="in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        sizes = [round(float(text) * MIB) for text in options.sizes.split(",")]
        measure(sizes, options.rounds, options.steps)
        return 0
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.mbit:
        return on_two_hosts(options.mbit, command)
    run = [sys.executable, "-m", "tfdist.launch", "-np", "2", *command]
    return subprocess.run(run, timeout=DEADLINE_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
