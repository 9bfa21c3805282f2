"""The gradient of an embedding, reduced by rows and as a dense tensor.

    tfdistrun -np 2 python benchmarks/sparse_gradients.py [--rounds 7] [--ids 4096]

A step is the gradient of one table with respect to `--ids` random rows of it on each
rank, its reduction, and SGD's update. Both ways make their steps in turn; rank 0
reports for each size of the table the median of the rounds' times, their ratio (above
1: rows are faster), the data bytes that it has sent in a step, and by how much its
memory has grown at most (rows are measured first: memory does not shrink).
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.core import native

WIDTH = 64
TABLE_ROWS = (1_000, 32_768, 100_000, 1_000_000)  # 32,768: 8 MiB
STEPS = 5


def sent_bytes() -> int:
    """Data bytes that this rank has sent since it started."""
    return sum(int(link["data_bytes_sent"]) for link in native.counters()["links"])


def peak_mib() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_step(rows: int, count: int, sparse_as_dense: bool) -> Callable[[], None]:
    """A traced step on a table of its own."""
    table = keras.Variable(np.zeros((rows, WIDTH), "float32"), name="table")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.1), sparse_as_dense=sparse_as_dense
    )
    rng = np.random.default_rng(tfdist.rank())
    ids = tf.constant(rng.integers(0, rows, count))
    factors = tf.constant(rng.normal(size=(count, WIDTH)), tf.float32)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, ids) * factors)
        optimizer.apply(tape.gradient(loss, [table.value]), [table])

    return step


def timed_s(step: Callable[[], None]) -> float:
    """Seconds for one step, the mean of some that all ranks begin together."""
    tfdist.barrier()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin_s) / STEPS


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ids", type=int, default=4096, help="rows used by a rank")
    options = parser.parse_args()
    tfdist.init()
    for rows in TABLE_ROWS:
        steps, sent, grown = [], [], []
        for sparse_as_dense in (False, True):
            before_mib = peak_mib()
            step = make_step(rows, options.ids, sparse_as_dense)
            step()
            before = sent_bytes()
            step()
            sent.append(sent_bytes() - before)
            grown.append(peak_mib() - before_mib)
            steps.append(step)
        times = [[timed_s(step) for step in steps] for _ in range(options.rounds)]
        by_rows, dense = (
            statistics.median(column) for column in zip(*times, strict=True)
        )
        ratio = statistics.median(b / a for a, b in times)
        if tfdist.rank() == 0:
            print(
                f"{rows:9,} rows, {rows * WIDTH * 4 / 2**20:6.1f} MiB: "
                f"by rows {1e3 * by_rows:7.2f} ms, {sent[0] / 2**20:7.2f} MiB sent, "
                f"+{grown[0]:.0f} MiB; dense {1e3 * dense:7.2f} ms, "
                f"{sent[1] / 2**20:7.2f} MiB sent, +{grown[1]:.0f} MiB; "
                f"dense/rows {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
