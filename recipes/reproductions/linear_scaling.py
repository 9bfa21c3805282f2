"""With a larger batch, the learning rate has to grow with it.

python recipes/reproductions/linear_scaling.py
"""

from collections.abc import Callable, Mapping

import keras
import study
from study import Check, Study
from training import PER_RANK, Setting

from tfdist.optimizers import MomentumSGD, scaled_rate

RATE, EPOCHS, RANKS = 0.01, 12, 11
SMALL, SAME, SCALED = "1 rank", "11 ranks, same rate", "11 ranks, scaled rate"


def sgd(rate: float) -> Callable[[int], keras.optimizers.Optimizer]:
    """Returns a function that creates SGD with momentum, for any number of steps."""
    return lambda steps_per_epoch: MomentumSGD(rate)


def setting(ranks: int, rate: float) -> Setting:
    """Returns a training of the network without batch normalization."""
    return Setting(ranks, EPOCHS, sgd(rate), normalized=False)


def judge(accuracy: Mapping[str, float]) -> list[Check]:
    """Compares the accuracies with the mark."""
    gap = accuracy[SMALL] - accuracy[SAME]
    closed = (accuracy[SCALED] - accuracy[SAME]) / gap if gap > 0 else 0.0
    return [
        Check("the same rate loses at least 5 points", f"{100 * gap:.1f}", gap >= 0.05),
        Check(
            "the scaled rate wins back at least 50 % of them",
            f"{100 * closed:.0f} %",
            closed >= 0.5,
        ),
    ]


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
    settings={
        SMALL: setting(1, RATE),
        SAME: setting(RANKS, RATE),
        SCALED: setting(RANKS, LARGE_RATE),
    },
    judge=judge,
    confirmed=SCALED,
)

if __name__ == "__main__":
    study.main(STUDY)
