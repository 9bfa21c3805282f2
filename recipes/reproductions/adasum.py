"""With the learning rate of one rank, Adasum trains better than an average.

python recipes/reproductions/adasum.py
"""

import functools
from collections.abc import Mapping

import keras
import networks
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most
from training import (
    PER_RANK,
    GradientFunction,
    Setting,
    accuracy_of,
    gradients_of,
    shuffled,
    train,
    train_on_ranks,
)

import tfdist
from tfdist.optimizers import MomentumSGD

RATE, HIGH_RATE, EPOCHS, RANKS, REAL_RANKS = 0.01, 0.05, 12, 16, 4
AVERAGE, ADASUM = f"average, rate {RATE}", f"Adasum, rate {RATE}"
SUM_HIGH, ADASUM_HIGH = f"sum, rate {HIGH_RATE}", f"Adasum, rate {HIGH_RATE}"


def adasum(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns the combination of two gradients of one variable."""
    dot = tf.reduce_sum(a * b)
    of_a = tf.math.divide_no_nan(dot, 2 * tf.reduce_sum(a * a))
    of_b = tf.math.divide_no_nan(dot, 2 * tf.reduce_sum(b * b))
    return (1 - of_a) * a + (1 - of_b) * b


def combined(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Combines the gradients of all ranks in pairs; their number is a power of 2."""
    while len(gradients) > 1:
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        gradients = [adasum(a, b) for a, b in pairs]
    return gradients[0]


def simulated(model: keras.Model, operation: str) -> GradientFunction:
    """Returns a function that combines the gradients of all ranks."""
    of_one = gradients_of(model)
    combine = {"average": tf.add_n, "sum": tf.add_n, "adasum": combined}[operation]
    factor = 1 / RANKS if operation == "average" else 1.0

    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        parts = zip(tf.split(images, RANKS), tf.split(labels, RANKS), strict=True)
        by_rank = [of_one(*part) for part in parts]
        by_variable = zip(*by_rank, strict=True)
        return [factor * combine(list(own)) for own in by_variable]

    return gradients


def accuracies(operation: str, rate: float, seed: int) -> list[float]:
    """Trains with all ranks in one process; returns the accuracy of each epoch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model = networks.plain()
    epochs = shuffled(RANKS * PER_RANK, EPOCHS, seed)
    steps = train(model, MomentumSGD(rate), epochs, simulated(model, operation))
    return [accuracy_of(model) for _ in steps]


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    gained = accuracy[ADASUM] - accuracy[AVERAGE]
    checks = [
        at_least("gain of Adasum over the average, same rate", gained, 5, " points"),
        at_most(f"accuracy of the sum at rate {HIGH_RATE}", accuracy[SUM_HIGH], 50),
        at_least(f"accuracy of Adasum at rate {HIGH_RATE}", accuracy[ADASUM_HIGH], 80),
    ]
    if on_ranks is not None:
        gained = on_ranks["Adasum"] - on_ranks["average"]
        text = "gain of Adasum over the average, real ranks"
        checks.append(at_least(text, gained, 0, " points", is_of_ranks=True))
    return checks


def trained_on_ranks() -> dict[str, float]:
    """Trains on the ranks of this job, with `DistributedOptimizer`."""
    setting = Setting(REAL_RANKS, EPOCHS, lambda _: MomentumSGD(RATE), normalized=False)
    operations = {"average": tfdist.ReduceOp.AVERAGE, "Adasum": tfdist.ReduceOp.ADASUM}
    return {name: train_on_ranks(setting, op=op) for name, op in operations.items()}


STUDY = Study(
    name="adasum",
    title="Adasum",
    claim=(
        "With the learning rate of one rank, combining the gradients of many ranks by "
        "Adasum trains better than averaging them. Adasum also trains with a rate at "
        "which their sum diverges."
    ),
    source="Maleki et al. 2021, section 3 (arXiv:2006.02924)",
    workload=(
        f"digits, 3 hidden layers of 128 units, SGD with momentum 0.9, {EPOCHS} epochs,"
        f" {RANKS} ranks with {PER_RANK} samples each"
    ),
    runs={
        AVERAGE: functools.partial(accuracies, "average", RATE),
        ADASUM: functools.partial(accuracies, "adasum", RATE),
        SUM_HIGH: functools.partial(accuracies, "sum", HIGH_RATE),
        ADASUM_HIGH: functools.partial(accuracies, "adasum", HIGH_RATE),
    },
    judge=judge,
    ranks=REAL_RANKS,
    on_ranks=trained_on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
