"""Sending gradients as float16 halves the bytes and keeps the accuracy.

python recipes/reproductions/half_precision.py
"""

from collections.abc import Callable, Mapping

import keras
import networks
import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most
from training import (
    PER_RANK,
    Setting,
    accuracy_of,
    gradients_of,
    shuffled,
    train,
    train_on_ranks,
)

import tfdist
from tfdist.core import native
from tfdist.optimizers import MomentumSGD

RANKS, EPOCHS, RATE = 4, 12, 0.05
SINGLE, HALF = "float32", "float16"
SHARE = "bytes sent, relative to float32"
ERROR = "relative error of an averaged gradient"


def sgd(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum, for any number of steps."""
    return MomentumSGD(RATE)


SETTING = Setting(RANKS, EPOCHS, sgd, normalized=False)


def simulate(dtype: str) -> Callable[[int], list[float]]:
    """Returns a function that trains with ranks that send gradients of a dtype."""

    def run(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed)
        model = networks.plain()
        own = gradients_of(model)

        def averaged(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
            parts = zip(tf.split(images, RANKS), tf.split(labels, RANKS), strict=True)
            by_rank = [[rounded(g) for g in own(*part)] for part in parts]
            # Added in float32, and rounded once on the way back.
            sums = [tf.add_n(one) for one in zip(*by_rank, strict=True)]
            return [rounded(one / RANKS) for one in sums]

        def rounded(gradient: tf.Tensor) -> tf.Tensor:
            return tf.cast(tf.cast(gradient, dtype), tf.float32)

        epochs = shuffled(RANKS * PER_RANK, EPOCHS, seed)
        steps = train(model, MomentumSGD(RATE), epochs, averaged)
        return [accuracy_of(model) for _ in steps]

    return run


def on_ranks() -> dict[str, float]:
    """Trains with both types; returns accuracies, bytes, and error of an average."""

    def bytes_sent() -> int:
        return sum(link["data_bytes_sent"] for link in native.counters()["links"])

    accuracies, counts = {}, []
    for name, compression in ((SINGLE, None), (HALF, "fp16")):
        before = bytes_sent()
        accuracy = train_on_ranks(SETTING, compression=compression)
        accuracies[f"accuracy, {name}"] = accuracy
        counts.append(bytes_sent() - before)
    own = np.random.default_rng(tfdist.rank()).normal(size=10_000)
    variable, found = tf.Variable(own.astype("float32")), []
    for compression in (None, "fp16"):
        with tfdist.DistributedGradientTape(compression=compression) as tape:
            loss = tf.reduce_sum(tf.square(variable)) / 2
        found.append(tape.gradient(loss, [variable])[0].numpy())
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    return {**accuracies, SHARE: counts[1] / counts[0], ERROR: float(error)}


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares accuracies, bytes and the error."""
    difference = abs(accuracy[SINGLE] - accuracy[HALF])
    checks = [at_most("difference of the accuracies", difference, 0.7, " points")]
    if on_ranks is not None:
        share, error = on_ranks[SHARE], on_ranks[ERROR]
        checks += [
            at_least(SHARE, share, 0.48, is_of_ranks=True),
            at_most(SHARE, share, 0.52, is_of_ranks=True),
            at_most(ERROR, error, 1e-3, is_of_ranks=True),
        ]
    return checks


STUDY = Study(
    name="half_precision",
    title="Gradients in half precision",
    claim="Sending gradients as float16 halves the bytes and keeps the accuracy.",
    source="Akiba et al. 2017, section 4 (arXiv:1711.04325)",
    workload=(
        f"digits, 3 hidden layers of 128 units, SGD with momentum 0.9 and rate {RATE}, "
        f"{EPOCHS} epochs, {RANKS} ranks with {PER_RANK} samples each"
    ),
    runs={SINGLE: simulate(SINGLE), HALF: simulate(HALF)},
    judge=judge,
    ranks=RANKS,
    on_ranks=on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
