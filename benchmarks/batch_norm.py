"""Cost of synchronized batch normalization in a chain of layers, forward and backward.

    tfdistrun -np 2 python benchmarks/batch_norm.py [--layers 20] [--rounds 9]

The chain has nothing but batch normalizations, so that nothing hides the messages: each
layer waits for its allgather, and each gradient for its allreduce. Plain and
synchronized layers take turns, on batches of the same shape; all ranks begin a round's
steps together. Reported, for several numbers of channels: the median of the rounds'
times, and the additional time of a layer with its two messages, in microseconds. On a
busy machine, the difference of the shortest times is more reliable.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdist

ROWS = 32
CHANNELS = (64, 512, 2048)


def chain(layers: list[Any], channels: int) -> Callable[[], Any]:
    """A step through all layers and back."""
    for layer in layers:
        layer.build((None, channels))
    x = tf.random.normal((ROWS, channels))

    @tf.function(jit_compile=False)
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in layers:
                y = layer(y, training=True)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, x)

    return lambda: step(x)


def seconds(step: Callable[[], Any], count: int) -> float:
    """Mean seconds of one step."""
    tfdist.barrier()
    begin_s = time.perf_counter()
    for _ in range(count):
        step().numpy()
    return (time.perf_counter() - begin_s) / count


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=20, help="of the chain")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    options = parser.parse_args()
    tfdist.init()
    makers = (keras.layers.BatchNormalization, tfdist.layers.SyncBatchNormalization)
    for channels in CHANNELS:
        steps = [
            chain([make() for _ in range(options.layers)], channels) for make in makers
        ]
        for step in steps:
            seconds(step, 3)
        rounds = [
            [seconds(step, options.steps) for step in steps]
            for _ in range(options.rounds)
        ]
        plain_s, synchronised_s = map(statistics.median, zip(*rounds, strict=True))
        extra_us = (synchronised_s - plain_s) / options.layers * 1e6
        best_s = [min(times) for times in zip(*rounds, strict=True)]
        best_us = (best_s[1] - best_s[0]) / options.layers * 1e6
        if tfdist.rank() == 0:
            print(
                f"{channels:5} channels: {plain_s * 1e3:6.2f} ms plain, "
                f"{synchronised_s * 1e3:6.2f} ms synchronized: {extra_us:4.0f} us more "
                f"a layer ({best_us:.0f} by the shortest)",
                flush=True,
            )


if __name__ == "__main__":
    main()
