"""The learning rate has to grow with the batch size.

python recipes/reproductions/linear_scaling.py
"""

import functools
from collections.abc import Callable, Mapping

import keras
import study
from study import Check, Study, at_least, at_most
from training import PER_RANK, Setting, simulate, train_on_ranks

from tfdist.optimizers import MomentumSGD, scaled_rate

RATE, EPOCHS, RANKS = 0.01, 12, 11
SMALL, SAME, SCALED = "1 rank", "11 ranks, same rate", "11 ranks, scaled rate"


def sgd(rate: float) -> Callable[[int], keras.optimizers.Optimizer]:
    """Returns a function that creates SGD with momentum, for any number of steps."""
    return lambda steps_per_epoch: MomentumSGD(rate)


def setting(ranks: int, rate: float) -> Setting:
    """Returns the setting for the network without batch normalization."""
    return Setting(ranks, EPOCHS, sgd(rate), normalized=False)


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    gap = accuracy[SMALL] - accuracy[SAME]
    closed = 100 * (accuracy[SCALED] - accuracy[SAME]) / gap if gap > 0 else 0.0
    checks = [
        at_least("accuracy lost with the same rate", gap, 5, " points"),
        at_least("part of it that the scaled rate recovers", closed, 50, " %"),
    ]
    if on_ranks is not None:
        below = accuracy[SCALED] - on_ranks["accuracy"]
        text = "accuracy lost with real ranks"
        checks.append(at_most(text, below, 2, " points", is_of_ranks=True))
    return checks


LARGE_RATE = scaled_rate(RATE, global_batch=RANKS * PER_RANK, base_batch=PER_RANK)
STUDY = Study(
    name="linear_scaling",
    title="Linear scaling",
    claim=(
        "In the same number of epochs, a batch that is k times larger loses accuracy "
        "with the rate of the small batch, and much less with a rate k times as large."
    ),
    source="Goyal et al. 2017, section 2.1 (arXiv:1706.02677)",
    workload=(
        f"digits, 3 hidden layers of 128 units, SGD with momentum 0.9, {EPOCHS} epochs,"
        f" rate {RATE} for a batch of {PER_RANK}, {LARGE_RATE:.2f} for "
        f"{RANKS * PER_RANK}"
    ),
    runs={
        SMALL: functools.partial(simulate, setting(1, RATE)),
        SAME: functools.partial(simulate, setting(RANKS, RATE)),
        SCALED: functools.partial(simulate, setting(RANKS, LARGE_RATE)),
    },
    judge=judge,
    ranks=RANKS,
    on_ranks=lambda: {"accuracy": train_on_ranks(setting(RANKS, LARGE_RATE))},
)

if __name__ == "__main__":
    study.main(STUDY)
