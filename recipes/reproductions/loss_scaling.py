"""Small gradients are lost in float16, unless the loss is scaled.

python recipes/reproductions/loss_scaling.py
"""

from collections.abc import Callable, Mapping

import digits
import keras
import networks
import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most
from training import PER_RANK

import tfdist

EPOCHS, RATE, RANKS, SMALL = 6, 0.01, 2, 2.0**-28
SINGLE, UNSCALED, SCALED = "float32", "float16", "float16, scaled loss"


def compiled(kind: str) -> keras.Model:
    """Returns a network whose loss, and so its gradients, are very small.

    The rate is divided by the factor of the loss, so steps in float32 are as usual.
    """
    keras.config.set_dtype_policy("float32" if kind == SINGLE else "mixed_float16")
    try:
        model = networks.plain()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = keras.optimizers.SGD(RATE / SMALL, momentum=0.9)
    if kind == SCALED:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=2.0**26, dynamic_growth_steps=100
        )
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def small_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return SMALL * cross_entropy(labels, tf.cast(logits, tf.float32))

    # With the default, Keras would add a LossScaleOptimizer.
    model.compile(optimizer, small_loss, auto_scale_loss=False)
    return model


def simulate(kind: str) -> Callable[[int], list[float]]:
    """Returns a function that trains in one process and returns losses / `SMALL`."""

    def run(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed)
        model, (images, labels) = compiled(kind), digits.load().train
        history = model.fit(
            images, labels, batch_size=PER_RANK, epochs=EPOCHS, verbose=0
        )
        return [float(loss / SMALL) for loss in history.history["loss"]]

    return run


def on_ranks() -> dict[str, float]:
    """Makes one rank's gradients infinite; counts the ranks that skip the step."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=1024.0
    )
    optimizer = tfdist.DistributedOptimizer(optimizer)
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer.build([variable])
    value = np.inf if tfdist.rank() == 1 else 1.0
    optimizer.apply([tf.fill([3], tf.constant(value, tf.float32))], [variable])
    scales = tfdist.allgather(tf.reshape(optimizer.dynamic_scale.value, [1])).numpy()
    weights = tfdist.allgather(variable.value[None]).numpy()
    return {
        "ranks that skipped the step": float((weights == 1).all(axis=1).sum()),
        "ranks that halved the scale": float((scales == 512).sum()),
    }


def judge(
    loss: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the losses."""
    off = 100 * abs(loss[SCALED] / loss[SINGLE] - 1)
    checks = [
        at_least("loss in float16, not scaled (ln 10 = 2.303)", loss[UNSCALED], 2.2),
        at_most("loss with loss scaling, difference from float32", off, 2, " %"),
    ]
    for name, count in (on_ranks or {}).items():
        checks.append(at_least(name, count, RANKS, is_of_ranks=True))
    return checks


STUDY = Study(
    name="loss_scaling",
    title="Loss scaling",
    claim=(
        "Gradients below the smallest number of float16 are lost. With a scaled loss, "
        "training in float16 matches training in float32. If the gradients of one rank "
        "overflow, all ranks skip the step."
    ),
    source="Micikevicius et al. 2018, section 3.2 (arXiv:1710.03740)",
    workload=(
        "digits, 3 hidden layers of 128 units, SGD with momentum 0.9 and rate "
        f"{RATE}, batch {PER_RANK}, {EPOCHS} epochs; the loss is multiplied by 2^-28, "
        "and the rate divided by it"
    ),
    runs={kind: simulate(kind) for kind in (SINGLE, UNSCALED, SCALED)},
    judge=judge,
    ranks=RANKS,
    on_ranks=on_ranks,
    values="training loss",
)

if __name__ == "__main__":
    study.main(STUDY)
