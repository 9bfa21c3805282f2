"""A warm-up of the rate makes a large batch trainable.

python recipes/reproductions/warmup.py
"""

import functools
from collections.abc import Mapping

import study
from study import Check, Study, at_least, at_most
from training import PER_RANK, Setting, scaled_setting, simulate, train_on_ranks

RATE, EPOCHS, RANKS, WARMUP_EPOCHS = 0.3, 14, 11, 4
SMALL, WITHOUT, WITH = "1 rank", "11 ranks, no warm-up", "11 ranks, warm-up"


def setting(ranks: int, warmup_epochs: int) -> Setting:
    """Returns the setting with a rate that is scaled to the number of ranks."""
    return scaled_setting(ranks, RATE, EPOCHS, warmup=warmup_epochs)


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    checks = [
        at_most("without a warm-up", accuracy[WITHOUT], 80),
        at_least("with a warm-up", accuracy[WITH], 90),
    ]
    if on_ranks is not None:
        found, text = on_ranks["accuracy"], "with a warm-up, real ranks"
        checks.append(at_least(text, found, 90, is_of_ranks=True))
    return checks


STUDY = Study(
    name="warmup",
    title="Warm-up",
    claim=(
        "If the first steps with the scaled rate are unstable, a rate that rises over "
        "the first epochs closes most of the gap to the small batch."
    ),
    source="Goyal et al. 2017, section 2.2 (arXiv:1706.02677)",
    workload=(
        "digits, 5 hidden layers of 96 units, batch normalization over the 32 samples "
        f"of each rank, SGD with momentum 0.9 and weight decay 1e-4, {EPOCHS} epochs, "
        f"rate {RATE} for a batch of {PER_RANK}, {RATE * RANKS:.1f} for "
        f"{RANKS * PER_RANK}, divided by 10 after 60 % and 85 %; warm-up from 0 in "
        f"{WARMUP_EPOCHS} epochs"
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
