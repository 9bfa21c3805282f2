"""After only a few steps, statistics of the last batch are better than moving ones.

python recipes/reproductions/moving_statistics.py
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least
from training import PER_RANK, accuracy_of, fit_on_ranks, scaled_setting, simulate

import tfdist

RATE, EPOCHS, RANKS, WARMUP_EPOCHS = 0.1, 7, 11, 2
MOVING, LAST = "moving, momentum 0.99 (Keras's default)", "last batch, momentum 0"
MOMENTA = {MOVING: 0.99, LAST: 0.0}
SETTINGS = {
    name: dataclasses.replace(
        scaled_setting(RANKS, RATE, EPOCHS, warmup=WARMUP_EPOCHS), momentum=momentum
    )
    for name, momentum in MOMENTA.items()
}


def on_ranks() -> dict[str, float]:
    """Trains with each momentum, and estimates the first model's statistics."""
    model, moving = fit_on_ranks(SETTINGS[MOVING])
    images = SETTINGS[MOVING].load().train[0]
    own = np.array_split(images, RANKS)[tfdist.rank()]
    batches = tf.data.Dataset.from_tensor_slices(own).batch(PER_RANK)
    tfdist.layers.estimate_moving_statistics(model, batches)
    estimated = accuracy_of(model)
    _, last = fit_on_ranks(SETTINGS[LAST])
    return {"moving": moving, "estimated": estimated, "last batch": last}


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies."""
    gain = accuracy[LAST] - accuracy[MOVING]
    checks = [at_least("gain of the last batch over momentum 0.99", gain, 5, " points")]
    if on_ranks is not None:
        checks += [
            at_least(
                f"gain of {name} over momentum 0.99, real ranks",
                on_ranks[name] - on_ranks["moving"],
                5,
                " points",
                is_of_ranks=True,
            )
            for name in ("estimated", "last batch")
        ]
    return checks


STUDY = Study(
    name="moving_statistics",
    title="Batch-normalization statistics after only a few steps",
    claim=(
        "After only a few steps with a large batch, the moving statistics do not match "
        "the trained weights. The statistics of the last batch, combined over the "
        "ranks, do match them, and so do statistics that are estimated from several "
        "batches after training."
    ),
    source=(
        "Akiba et al. 2017, section 3 (arXiv:1711.04325); Wu & Johnson 2021, section "
        "3 (arXiv:2105.07576)"
    ),
    workload=(
        "digits, 5 hidden layers of 96 units, batch normalization over the "
        f"{PER_RANK} samples of each of {RANKS} ranks, SGD with momentum 0.9 and "
        f"weight decay 1e-4, rate {RATE * RANKS:.1f}, divided by 10 after 60 % and "
        "85 % of training, "
        f"warm-up from 0 in {WARMUP_EPOCHS} epochs, {EPOCHS} epochs of 4 steps"
    ),
    runs={name: functools.partial(simulate, one) for name, one in SETTINGS.items()},
    judge=judge,
    ranks=RANKS,
    on_ranks=on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
