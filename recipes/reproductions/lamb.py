"""LAMB trains with a large batch nearly as well as AdamW with a small one.

python recipes/reproductions/lamb.py
"""

import functools
from collections.abc import Mapping

import digits
import keras
import study
from study import Check, Study, at_least, at_most
from training import Setting, rates, simulate, train_on_ranks

from tfdist.optimizers import LAMB

# Chosen by training on 3,200 of the training images and testing on 800 others.
ADAM_RATE, LARGE_ADAM_RATE, LAMB_RATE = 0.003, 0.016, 0.04
EPOCHS, RANKS, WARMUP_EPOCHS, DECAY = 14, 16, 4, 0.01
SMALL, ADAM, LAYERWISE = (
    "1 rank, AdamW",
    f"{RANKS} ranks, AdamW",
    f"{RANKS} ranks, LAMB",
)


def setting(name: str) -> Setting:
    """Returns the setting of that name."""
    ranks = 1 if name == SMALL else RANKS
    rate = {SMALL: ADAM_RATE, ADAM: LARGE_ADAM_RATE, LAYERWISE: LAMB_RATE}[name]

    def optimizer(steps_per_epoch: int) -> keras.optimizers.Optimizer:
        warmup = 0 if name == SMALL else WARMUP_EPOCHS
        falling = rates(rate, EPOCHS, steps_per_epoch, warmup=warmup)
        kind = LAMB if name == LAYERWISE else keras.optimizers.AdamW
        return kind(falling, weight_decay=DECAY)

    return Setting(ranks, EPOCHS, optimizer, normalized=True, load=digits.load_mnist)


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    checks = [
        at_least("LAMB with the large batch", accuracy[LAYERWISE], 93),
        at_most("gap to AdamW", accuracy[SMALL] - accuracy[LAYERWISE], 1, " points"),
    ]
    if on_ranks is not None:
        text, found = "LAMB, real ranks", on_ranks["accuracy"]
        checks.append(at_least(text, found, 93, is_of_ranks=True))
    return checks


STUDY = Study(
    name="lamb",
    title="LAMB",
    claim=(
        "LAMB trains with a batch that is 16 times as large nearly as well as AdamW "
        "with the small batch."
    ),
    source="You et al. 2020, algorithm 2 (arXiv:1904.00962)",
    workload=(
        "4,096 images of MNIST, 5 hidden layers of 96 units with batch normalization, "
        f"{EPOCHS} epochs, weight decay {DECAY}, batches of 32 and 512; rates "
        f"{ADAM_RATE} (AdamW), {LARGE_ADAM_RATE} (AdamW, large batch) and {LAMB_RATE} "
        f"(LAMB), divided by 10 after 60 % and 85 %; warm-up of {WARMUP_EPOCHS} epochs "
        "with the large batch"
    ),
    runs={
        name: functools.partial(simulate, setting(name))
        for name in (SMALL, ADAM, LAYERWISE)
    },
    judge=judge,
    ranks=RANKS,
    on_ranks=lambda: {"accuracy": train_on_ranks(setting(LAYERWISE))},
)

if __name__ == "__main__":
    study.main(STUDY)
