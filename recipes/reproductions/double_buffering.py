"""With a warm-up, gradients that are one step old train nearly as well.

python recipes/reproductions/double_buffering.py
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
    rates,
    shuffled,
    train,
    train_on_ranks,
)

from tfdist.optimizers import MomentumSGD

RANKS, EPOCHS, RATE, WARMUP = 4, 16, 0.4, 4
HIGH_RATE = 0.2  # for the network without batch normalization
SYNCHRONOUS, BUFFERED = "synchronous", "double buffering"
HIGH, BUFFERED_HIGH = (
    f"{name}, no warm-up, no normalization" for name in (SYNCHRONOUS, BUFFERED)
)


def delayed(model: keras.Model) -> GradientFunction:
    """Returns a function for the gradients of the previous step; zeros in the first."""
    of_step = gradients_of(model)
    stored = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]

    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        before = [variable.read_value() for variable in stored]
        for variable, now in zip(stored, of_step(images, labels), strict=True):
            variable.assign(now)
        return before

    return gradients


def setting(*, normalized: bool) -> Setting:
    """Returns the setting for the network with or without batch normalization."""

    def optimizer(steps: int) -> keras.optimizers.Optimizer:
        if normalized:
            return MomentumSGD(rates(RATE, EPOCHS, steps, warmup=WARMUP))
        return MomentumSGD(HIGH_RATE)

    return Setting(RANKS, EPOCHS, optimizer, normalized=normalized)


def accuracies(is_delayed: bool, normalized: bool, seed: int) -> list[float]:
    """Trains with all ranks in one process; returns the accuracy of each epoch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    one = setting(normalized=normalized)
    model = networks.normalized(RANKS) if normalized else networks.plain()
    steps = train(
        model,
        one.optimizer(one.steps_per_epoch),
        shuffled(RANKS * PER_RANK, EPOCHS, seed),
        (delayed if is_delayed else gradients_of)(model),
    )
    return [accuracy_of(model) for _ in steps]


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    lost = accuracy[SYNCHRONOUS] - accuracy[BUFFERED]
    checks = [
        at_most("lost by double buffering, with a warm-up", lost, 1, " points"),
        at_least(f"synchronous at {HIGH_RATE}", accuracy[HIGH], 90),
        at_most(f"double buffering at {HIGH_RATE}", accuracy[BUFFERED_HIGH], 50),
    ]
    if on_ranks is not None:
        lost = on_ranks[SYNCHRONOUS] - on_ranks[BUFFERED]
        text = "lost by double buffering, with a warm-up, real ranks"
        checks.append(at_most(text, lost, 1, " points", is_of_ranks=True))
    return checks


def trained_on_ranks() -> dict[str, float]:
    """Trains on the ranks of this job, with `DistributedOptimizer`."""
    buffered = {"double_buffering": True, "compression": "fp16"}
    return {
        name: train_on_ranks(setting(normalized=True), **options)
        for name, options in ((SYNCHRONOUS, {}), (BUFFERED, buffered))
    }


STUDY = Study(
    name="double_buffering",
    title="Double buffering",
    claim=(
        "With a warm-up, updates with the gradients of the previous step, whose "
        "reduction can overlap with a whole step, cost at most one point of accuracy. "
        "The largest stable rate is lower than with synchronous updates."
    ),
    source="ChainerMN 1.3, 2018, double_buffering of its optimizer",
    workload=(
        f"digits, {RANKS} ranks with {PER_RANK} samples each, SGD with momentum 0.9, "
        f"{EPOCHS} epochs: 5 layers of 96 units with batch normalization, rate {RATE} "
        f"with a warm-up of {WARMUP} epochs; and 3 hidden layers of 128 units, rate "
        f"{HIGH_RATE}"
    ),
    runs={
        SYNCHRONOUS: functools.partial(accuracies, False, True),
        BUFFERED: functools.partial(accuracies, True, True),
        HIGH: functools.partial(accuracies, False, False),
        BUFFERED_HIGH: functools.partial(accuracies, True, False),
    },
    judge=judge,
    ranks=RANKS,
    on_ranks=trained_on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
