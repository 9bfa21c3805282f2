"""Gradients of unequal batches have to be weighted by their numbers of samples.

python recipes/reproductions/unequal_batches.py
"""

from collections.abc import Callable, Mapping
from typing import Any

import digits
import keras
import networks
import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most

import tfdist

SIZES = ((8, 24), (5, 11, 16))  # samples of each rank
WEIGHTED, PLAIN = "weighted", "not weighted"
ERROR, PLAIN_ERROR = "error of the weighted average", "error of the plain average"


class Gradients:
    """The gradient of a network at its initial weights, as one vector."""

    def __init__(self, seed: int) -> None:
        keras.utils.set_random_seed(0)
        self._images, self._labels = digits.load().train
        self._model = networks.plain()
        self._loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._rows = np.random.default_rng(seed).permutation(digits.TRAIN)

    def parts(self, sizes: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the samples of each rank."""
        return np.split(self._rows[: sum(sizes)], np.cumsum(sizes)[:-1])

    def of(
        self, rows: np.ndarray, tape: tf.GradientTape | None = None, **options: Any
    ) -> np.ndarray:
        """Returns the gradient of the mean loss of samples.

        Args:
            rows: the samples.
            tape: the tape that computes it; None: a new `tf.GradientTape`.
            **options: arguments of the tape's method `gradient`.
        """
        with tape or tf.GradientTape() as tape:
            logits = self._model(self._images[rows])
            loss = self._loss_of(self._labels[rows], logits)
        found = tape.gradient(loss, self._model.trainable_variables, **options)
        vector = np.concatenate([g.numpy().reshape(-1) for g in found])
        return vector.astype(np.float64)


def error_of(found: np.ndarray, right: np.ndarray) -> float:
    """Returns the relative error of a vector."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def simulate(name: str) -> Callable[[int], list[float]]:
    """Returns a function for the relative errors of an average, by batch sizes."""

    def run(seed: int) -> list[float]:
        gradients, errors = Gradients(seed), []
        for sizes in SIZES:
            parts = gradients.parts(sizes)
            weights = sizes if name == WEIGHTED else None
            by_rank = [gradients.of(rows) for rows in parts]
            mean = np.average(by_rank, axis=0, weights=weights)
            errors.append(error_of(mean, gradients.of(np.concatenate(parts))))
        return errors

    return run


def on_ranks() -> dict[str, float]:
    """Compares the averages of the tape with the gradient of all samples."""
    gradients, sizes = Gradients(0), SIZES[-1]
    parts = gradients.parts(sizes)
    right = gradients.of(np.concatenate(parts))
    found = {}
    for name, weight in ((ERROR, sizes[tfdist.rank()]), (PLAIN_ERROR, None)):
        own, tape = parts[tfdist.rank()], tfdist.DistributedGradientTape()
        found[name] = error_of(gradients.of(own, tape, weight=weight), right)
    return found


def judge(
    error: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the errors."""
    checks = [
        at_most("error of the weighted average", error[WEIGHTED], 1e-6),
        at_least("error of the plain average", error[PLAIN], 0.01),
    ]
    if on_ranks is not None:
        checks += [
            at_most(f"{ERROR}, real ranks", on_ranks[ERROR], 1e-6, is_of_ranks=True),
            at_least(
                f"{PLAIN_ERROR}, real ranks",
                on_ranks[PLAIN_ERROR],
                0.01,
                is_of_ranks=True,
            ),
        ]
    return checks


STUDY = Study(
    name="unequal_batches",
    title="Unequal batches",
    claim=(
        "The average of the ranks' gradients, weighted by their numbers of samples, is "
        "the gradient of all samples. The plain average is not."
    ),
    source="Goyal et al. 2017, section 3, remark 3 (arXiv:1706.02677)",
    workload=(
        "digits, 3 hidden layers of 128 units at their initial weights, batches of "
        + " and ".join(" + ".join(map(str, sizes)) for sizes in SIZES)
    ),
    runs={WEIGHTED: simulate(WEIGHTED), PLAIN: simulate(PLAIN)},
    judge=judge,
    ranks=len(SIZES[-1]),
    on_ranks=on_ranks,
    values="relative error",
    order="samples of the ranks",
    ticks=tuple(" + ".join(map(str, sizes)) for sizes in SIZES),
)

if __name__ == "__main__":
    study.main(STUDY)
