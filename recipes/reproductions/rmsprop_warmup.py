"""RMSprop warm-up with a slow start trains where a learning-rate warm-up fails.

python recipes/reproductions/rmsprop_warmup.py
"""

import functools
from collections.abc import Callable, Mapping

import keras
import study
from study import Check, Study, at_least
from training import PER_RANK, Setting, rates, simulate, train_on_ranks

from tfdist.optimizers import MomentumSGD, RMSpropWarmup, Warmup, scaled_rate

BASE_RATE, EPOCHS, RANKS = 0.3, 14, 22
WARMUP_EPOCHS, CENTER_EPOCHS, PERIOD_EPOCHS = 4, 4, 2
# Epochs, out of 90, at which the learning rate changes, and its factors.
SLOW_START = ((40, 70, 85), (0.5, 0.075, 0.01, 0.001))
LINEAR = "22 ranks, linear warm-up"
LINEAR_SLOW = "22 ranks, linear warm-up and slow start"
RMSPROP = "22 ranks, RMSprop warm-up and slow start"
RATE = scaled_rate(BASE_RATE, global_batch=RANKS * PER_RANK, base_batch=PER_RANK)


def with_linear_warmup(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Returns SGD whose rate rises linearly, and falls in steps."""
    falling = rates(RATE, EPOCHS, steps_per_epoch, warmup=WARMUP_EPOCHS)
    return MomentumSGD(falling, weight_decay=1e-4)


def slow_start(steps_per_epoch: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Returns the rates of the paper; the first one is half of the scaled rate."""
    epochs, factors = SLOW_START
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [round(epoch * EPOCHS * steps_per_epoch / 90) - 1 for epoch in epochs],
        [RATE * factor for factor in factors],
    )


def with_linear_warmup_and_slow_start(
    steps_per_epoch: int,
) -> keras.optimizers.Optimizer:
    """Returns SGD whose rate rises linearly to that of the slow start."""
    rising = Warmup(slow_start(steps_per_epoch), WARMUP_EPOCHS * steps_per_epoch)
    return MomentumSGD(rising, weight_decay=1e-4)


def with_rmsprop_warmup(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Returns SGD that begins as RMSprop, with the slow start of the paper."""
    return RMSpropWarmup(
        slow_start(steps_per_epoch),
        center_steps=CENTER_EPOCHS * steps_per_epoch,
        period_steps=PERIOD_EPOCHS * steps_per_epoch,
        rmsprop_rate=3e-3,
        weight_decay=1e-4,
    )


def setting(optimizer: Callable[[int], keras.optimizers.Optimizer]) -> Setting:
    """Returns the setting with an optimizer, which depends on the number of steps."""
    return Setting(RANKS, EPOCHS, optimizer, normalized=True)


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    ahead = accuracy[RMSPROP] - accuracy[LINEAR]
    checks = [
        at_least("with RMSprop warm-up", accuracy[RMSPROP], 95),
        at_least("gain over a linear warm-up", ahead, 10, " points"),
    ]
    if on_ranks is not None:
        found, text = on_ranks["accuracy"], "with RMSprop warm-up, real ranks"
        checks.append(at_least(text, found, 95, is_of_ranks=True))
    return checks


STUDY = Study(
    name="rmsprop_warmup",
    title="RMSprop warm-up",
    claim=(
        "If a linear warm-up is not enough for a batch, training that begins with "
        "RMSprop, changes to SGD, and has a slow start keeps the accuracy."
    ),
    source="Akiba et al. 2017, section 3 (arXiv:1711.04325)",
    workload=(
        "digits, 5 hidden layers of 96 units, batch normalization over the 32 samples "
        f"of each rank, weight decay 1e-4, {EPOCHS} epochs, batch {RANKS * PER_RANK}, "
        f"rate {RATE:.1f}; linear warm-up of {WARMUP_EPOCHS} epochs, or RMSprop with "
        f"rate 3e-3, center {CENTER_EPOCHS} and period {PERIOD_EPOCHS} epochs"
    ),
    runs={
        LINEAR: functools.partial(simulate, setting(with_linear_warmup)),
        LINEAR_SLOW: functools.partial(
            simulate, setting(with_linear_warmup_and_slow_start)
        ),
        RMSPROP: functools.partial(simulate, setting(with_rmsprop_warmup)),
    },
    judge=judge,
    ranks=RANKS,
    on_ranks=lambda: {"accuracy": train_on_ranks(setting(with_rmsprop_warmup))},
)

if __name__ == "__main__":
    study.main(STUDY)
