"""Linear scaling with a warm-up, on the larger images of MNIST.

python recipes/reproductions/mnist.py
"""

import functools
from collections.abc import Mapping

import digits
import study
from study import Check, Study, at_least, at_most
from training import PER_RANK, Setting, scaled_setting, simulate, train_on_ranks

# Chosen by training on 3,200 of the training images and testing on 800 others.
RATE, EPOCHS, RANKS, WARMUP_EPOCHS = 0.2, 14, 16, 4
SMALL = "1 rank"
WITHOUT, WITH = f"{RANKS} ranks, no warm-up", f"{RANKS} ranks, warm-up"


def setting(ranks: int, warmup_epochs: int) -> Setting:
    """Returns the setting with a rate that is scaled to the number of ranks."""
    return scaled_setting(
        ranks, RATE, EPOCHS, warmup=warmup_epochs, load=digits.load_mnist
    )


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    checks = [
        at_most("without a warm-up", accuracy[WITHOUT], 80),
        at_least("with a warm-up", accuracy[WITH], 90),
        at_most("gap to 1 rank", accuracy[SMALL] - accuracy[WITH], 3, " points"),
    ]
    if on_ranks is not None:
        found, text = on_ranks["accuracy"], "with a warm-up, real ranks"
        checks.append(at_least(text, found, 90, is_of_ranks=True))
    return checks


STUDY = Study(
    name="mnist",
    title="A second data set",
    claim=(
        "On MNIST too, a rate that is scaled to the batch needs a warm-up. The "
        "accuracy is then close to that of the small batch."
    ),
    source="Goyal et al. 2017, sections 2.1 and 2.2 (arXiv:1706.02677)",
    workload=(
        "4,096 images of MNIST, 5 hidden layers of 96 units, batch normalization over "
        f"the {PER_RANK} samples of each rank, SGD with momentum 0.9 and weight decay "
        f"1e-4, {EPOCHS} epochs, rate {RATE} for a batch of {PER_RANK}, "
        f"{RATE * RANKS:.1f} for {RANKS * PER_RANK}, divided by 10 after 60 % and "
        "85 %; "
        f"warm-up from 0 in {WARMUP_EPOCHS} epochs"
    ),
    runs={
        SMALL: functools.partial(simulate, setting(1, 0)),
        WITHOUT: functools.partial(simulate, setting(RANKS, 0)),
        WITH: functools.partial(simulate, setting(RANKS, WARMUP_EPOCHS)),
    },
    judge=judge,
    ranks=RANKS,
    on_ranks=lambda: {"accuracy": train_on_ranks(setting(RANKS, WARMUP_EPOCHS))},
)

if __name__ == "__main__":
    study.main(STUDY)
