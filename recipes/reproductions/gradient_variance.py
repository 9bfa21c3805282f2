"""The average of the gradients of K ranks has 1 / K of the variance of one gradient.

python recipes/reproductions/gradient_variance.py
"""

from collections.abc import Callable, Mapping

import digits
import keras
import networks
import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most
from training import PER_RANK

import tfdist

RANKS, BATCHES = (1, 2, 4, 8), 200
REAL_RANKS = 4
NAME = "K var(K) / var(1)"


def gradient_function() -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from samples, as row numbers, to the mean gradient."""
    keras.utils.set_random_seed(0)
    images, labels = digits.load().train
    model = networks.plain()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def gradient(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images))
        found = tape.gradient(loss, model.trainable_variables)
        return tf.concat([tf.reshape(g, [-1]) for g in found], 0)

    return lambda rows: gradient(images[rows], labels[rows]).numpy()


class Variance:
    """Sum of the variances of all elements of vectors; the vectors are not stored."""

    def __init__(self) -> None:
        self._count, self._squares = 0, 0.0
        self._sum: np.ndarray | float = 0.0

    def add(self, vector: np.ndarray) -> None:
        """Adds a vector."""
        wide = vector.astype(np.float64)
        self._count, self._sum = self._count + 1, self._sum + wide
        self._squares += float(wide @ wide)

    def value(self) -> float:
        """Returns the unbiased estimate."""
        mean = self._sum / self._count
        return (self._squares - self._count * float(mean @ mean)) / (self._count - 1)


def simulate(seed: int) -> list[float]:
    """Returns K var(K) / var(1) for each number K of ranks."""
    gradient, rng = gradient_function(), np.random.default_rng(seed)
    found = []
    for ranks in RANKS:
        variance = Variance()
        for _ in range(BATCHES):
            parts = rng.integers(digits.TRAIN, size=(ranks, PER_RANK))
            variance.add(np.mean([gradient(rows) for rows in parts], axis=0))
        found.append(ranks * variance.value())
    return [value / found[0] for value in found]


def on_ranks() -> dict[str, float]:
    """Returns K var(K) / var(1) for this job, which averages with allreduce."""
    gradient, own, averaged = gradient_function(), Variance(), Variance()
    rng = np.random.default_rng(tfdist.rank())
    for _ in range(BATCHES):
        found = gradient(rng.integers(digits.TRAIN, size=PER_RANK))
        own.add(found)
        averaged.add(tfdist.allreduce(found).numpy())
    return {NAME: tfdist.size() * averaged.value() / own.value()}


def judge(
    ratio: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the last ratio, i.e. that of the most ranks."""
    most = f"{RANKS[-1]} ranks"
    checks = [at_least(most, ratio[NAME], 0.8), at_most(most, ratio[NAME], 1.25)]
    if on_ranks is not None:
        found, name = on_ranks[NAME], f"{REAL_RANKS} real ranks"
        checks += [
            at_least(name, found, 0.8, is_of_ranks=True),
            at_most(name, found, 1.25, is_of_ranks=True),
        ]
    return checks


STUDY = Study(
    name="gradient_variance",
    title="Variance of the gradient",
    claim=(
        "The variance of the averaged gradient is inversely proportional to the number "
        "of ranks."
    ),
    source="Goyal et al. 2017, section 2 (arXiv:1706.02677)",
    workload=(
        f"digits, 3 hidden layers of 128 units at their initial weights, {BATCHES} "
        f"random batches of {PER_RANK} samples per rank; a value of 1 means that the "
        "variance is proportional to 1 / K"
    ),
    runs={NAME: simulate},
    judge=judge,
    ranks=REAL_RANKS,
    on_ranks=on_ranks,
    values=NAME,
    order="K",
    ticks=tuple(map(str, RANKS)),
)

if __name__ == "__main__":
    study.main(STUDY)
