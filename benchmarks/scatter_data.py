"""Elements per second that a rank receives from its reader, or reads itself.

    tfdistrun -np 2 python benchmarks/scatter_data.py [--rounds 7] [--step-ms 50]

Rank 0 reads, rank 1 receives and is measured; nothing else runs. The elements come from
memory, so "itself" shows the speed of TensorFlow without any file. Both ways take
turns; reported is the median of the rounds. At the end, rank 1 makes steps of
`--step-ms` milliseconds with batches of 64 pictures, and prints how long they waited
for a batch, without the first step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfdist

Dataset = tf.data.Dataset


def jpegs(rank: int) -> Dataset:
    """Strings as long as a picture of ImageNet, with a label."""
    rng = np.random.default_rng(rank)
    files = tf.constant([rng.bytes(110_000) for _ in range(32)])
    return Dataset.range(2000).map(lambda n: (files[n % 32], n))


def pictures(rank: int) -> Dataset:
    """Decoded batches, 9.9 MB each."""
    images, labels = tf.zeros([64, 224, 224, 3], tf.uint8), tf.zeros([64, 1000])
    shade = tf.cast(rank, tf.uint8)
    return Dataset.range(100).map(lambda n: (images + shade, labels))


def digits(rank: int) -> Dataset:
    """Single small samples."""
    image = tf.zeros([28, 28, 1], tf.uint8) + tf.cast(rank, tf.uint8)
    return Dataset.range(20000).map(lambda n: (image, n))


def batched_digits(rank: int) -> Dataset:
    """The same in batches of 64."""
    return digits(rank).batch(64)


def seconds(dataset: Dataset) -> float:
    """Seconds to read the whole dataset on rank 1; rank 0 does nothing else."""
    tfdist.barrier()
    begin_s = time.perf_counter()
    if tfdist.rank() == 1:
        dataset.reduce(np.int64(0), lambda count, _: count + 1).numpy()
    elapsed_s = time.perf_counter() - begin_s
    tfdist.barrier()
    return elapsed_s


def compare(name: str, read: Callable[[int], Dataset], rounds: int) -> None:
    """Prints the medians of both ways."""
    own, sent = read(tfdist.rank()), tfdist.data.scatter(read)
    count = int(own.cardinality())
    size = sum(
        len(part) if type(part) is bytes else part.nbytes
        for part in tf.nest.flatten(next(own.as_numpy_iterator()))
    )
    found: dict[str, list[float]] = {"itself": [], "scatter": []}
    for _ in range(rounds):
        found["itself"].append(seconds(own))
        found["scatter"].append(seconds(sent))
    if tfdist.rank() == 1:
        rates = {way: count / statistics.median(all_s) for way, all_s in found.items()}
        columns = [
            f"{way} {rate:8.0f}/s {rate * size / 1e6:7.0f} MB/s"
            for way, rate in rates.items()
        ]
        print(f"{name:15} {size:9d} bytes   {'   '.join(columns)}", flush=True)


def waits(step_s: float) -> None:
    """Prints how long steps of that duration wait for their batch."""
    iterator = iter(tfdist.data.scatter(pictures))
    waited = []
    if tfdist.rank() == 1:
        for _ in range(60):
            begin_s = time.perf_counter()
            next(iterator)
            waited.append(1000 * (time.perf_counter() - begin_s))
            time.sleep(step_s)
        del waited[0]
        print(
            f"steps of {1000 * step_s:g} ms wait for a batch: median "
            f"{statistics.median(waited):.1f} ms, longest {max(waited):.1f} ms",
            flush=True,
        )
    tfdist.barrier()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    tfdist.init()
    if tfdist.size() != 2:
        parser.error("start it with tfdistrun -np 2")
    for read in (jpegs, pictures, digits, batched_digits):
        compare(read.__name__, read, arguments.rounds)
    waits(arguments.step_ms / 1000)


if __name__ == "__main__":
    main()
