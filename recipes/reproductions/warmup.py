"""A warm-up of the rate makes a large batch trainable.

python recipes/reproductions/warmup.py
"""

from collections.abc import Mapping

import keras
import study
from study import Check, Study
from training import PER_RANK, Setting, rates

from tfdist.optimizers import MomentumSGD, scaled_rate

RATE, EPOCHS, RANKS, WARMUP_EPOCHS = 0.3, 14, 11, 4
SMALL, WITHOUT, WITH = "1 rank", "11 ranks, no warm-up", "11 ranks, warm-up"


def setting(ranks: int, warmup_epochs: int) -> Setting:
    """Returns a training with a rate that is scaled to the number of ranks."""
    rate = scaled_rate(RATE, global_batch=ranks * PER_RANK, base_batch=PER_RANK)

    def optimizer(steps_per_epoch: int) -> keras.optimizers.Optimizer:
        falling = rates(rate, EPOCHS, steps_per_epoch, warmup=warmup_epochs)
        return MomentumSGD(falling, weight_decay=1e-4)

    return Setting(ranks, EPOCHS, optimizer, normalized=True)


def judge(accuracy: Mapping[str, float]) -> list[Check]:
    """Compares the accuracies with the mark."""
    without, with_warmup = accuracy[WITHOUT], accuracy[WITH]
    return [
        Check("at most 80 without a warm-up", f"{100 * without:.1f}", without <= 0.8),
        Check(
            "at least 90 with a warm-up", f"{100 * with_warmup:.1f}", with_warmup >= 0.9
        ),
    ]


STUDY = Study(
    name="warmup",
    title="Warm-up",
    claim=(
        "Where the first steps with the scaled rate are unstable, a rate that rises "
        "over the first epochs closes the gap to the small batch."
    ),
    source="Goyal et al. 2017, section 2.2 (arXiv:1706.02677)",
    workload=(
        "digits, 5 hidden layers of 96 units, batch normalization over the 32 samples "
        f"of each rank, SGD with momentum 0.9 and weight decay 1e-4, {EPOCHS} epochs, "
        f"rate {RATE} for a batch of {PER_RANK}, {RATE * RANKS:.1f} for "
        f"{RANKS * PER_RANK}, a tenth after 60 % and 85 %; warm-up from 0 in "
        f"{WARMUP_EPOCHS} epochs"
    ),
    settings={
        SMALL: setting(1, 0),
        WITHOUT: setting(RANKS, 0),
        WITH: setting(RANKS, WARMUP_EPOCHS),
    },
    judge=judge,
    confirmed=WITH,
)

if __name__ == "__main__":
    study.main(STUDY)
