"""Steps of `model.fit`: without XLA, with the split step, and compiled as a whole.

    make xla
    tfdistrun -np 2 python benchmarks/jit_compile.py [--rounds 9] [--steps 50]

The same model three times: `jit_compile=False`; `jit_compile=True` with the reduction
and the update outside of what XLA compiles (`xla="off"`); and with both inside, which
takes `libtfdist_xla.so`. They take turns, on the same batch, and all ranks begin a
measurement together. A first check compares their weights after five steps, to 1e-4.
Reported: the median step time of the rounds, its 10th and 90th percentile, and the
medians of its ratios, within a round, to those of the first two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.gradients import xla as gradient_xla

WAYS: dict[str, tuple[bool, str]] = {
    "jit_compile=False": (False, "off"),
    "split step": (True, "off"),
    "whole step": (True, "auto"),
}
MODELS = ("dense", "wide", "deep", "convolutions")


def layers(kind: str) -> list[Any]:
    """Layers with 0.3 or 5.8 million weights, many small ones, or convolutions."""
    dense = keras.layers.Dense
    if kind in ("dense", "wide"):
        width = 256 if kind == "dense" else 2048
        hidden = [dense(width, activation="relu") for _ in range(2)]
    elif kind == "deep":
        hidden = [dense(32, activation="gelu") for _ in range(24)]
    else:
        hidden = [
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
        ]
    return [keras.Input((784,)), *hidden, dense(10)]


def trained(
    kind: str, way: str, batch: tuple[Any, Any]
) -> tuple[Any, Callable[[], Any]]:
    """Returns a model after five steps, and a function that makes one more."""
    jit_compile, xla = WAYS[way]
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers(kind))
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3), xla=xla)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    model.fit(data, steps_per_epoch=5, verbose=0, callbacks=callbacks)
    endless: Iterator[Any] = iter(data)
    return model, lambda: model.train_function(endless)


def seconds(step: Callable[[], Any], count: int) -> float:
    """Mean seconds of one step."""
    tfdist.barrier()
    begin_s = time.perf_counter()
    for _ in range(count):
        logs = step()
    float(logs["loss"])
    return (time.perf_counter() - begin_s) / count


def largest_difference(models: list[Any]) -> float:
    """Largest difference of a weight between the first model and any other."""
    first, *others = [[w.numpy() for w in model.weights] for model in models]
    return max(
        float(np.abs(a - b).max())
        for other in others
        for a, b in zip(first, other, strict=True)
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=50, help="steps a round")
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    options = parser.parse_args()
    tfdist.init()
    refusal = gradient_xla.unusable()
    if refusal is not None:
        raise SystemExit(f"No whole step to measure: {refusal}.")
    rng = np.random.default_rng(tfdist.rank())
    x = rng.normal(size=(options.batch, 784)).astype("float32")
    batch = (x, rng.integers(0, 10, size=options.batch))
    for kind in options.model:
        models, steps = zip(*[trained(kind, w, batch) for w in WAYS], strict=True)
        difference = largest_difference(list(models))
        if difference > 1e-4:
            raise SystemExit(f"{kind}: weights differ by {difference:.1e}.")
        for step in steps:
            seconds(step, 5)
        rounds = [
            [seconds(step, options.steps) for step in steps]
            for _ in range(options.rounds)
        ]
        for i, way in enumerate(WAYS):
            times = sorted(row[i] * 1e3 for row in rounds)
            plain, split = (
                statistics.median(row[i] / row[j] for row in rounds) for j in (0, 1)
            )
            low, high = times[len(times) // 10], times[-1 - len(times) // 10]
            if tfdist.rank() == 0:
                print(
                    f"{kind:12} {way:18} {statistics.median(times):7.2f} ms a step "
                    f"({low:.2f}-{high:.2f}), {plain:.2f} of jit_compile=False, "
                    f"{split:.2f} of the split step",
                    flush=True,
                )


if __name__ == "__main__":
    main()
