"""Gradients sent as float16 halve the bytes and keep the accuracy.

python recipes/reproductions/half_precision.py
"""

from collections.abc import Callable, Mapping

import digits
import keras
import networks
import numpy as np
import study
import tensorflow as tf
from study import Check, Study, at_least, at_most
from training import PER_RANK, Setting, train_on_ranks

import tfdist
from tfdist.core import native
from tfdist.optimizers import MomentumSGD

RANKS, EPOCHS, RATE = 4, 12, 0.05
SINGLE, HALF = "float32", "float16"
SHARE = "bytes sent, relative to float32"
ERROR = "relative error of an averaged gradient"


def sgd(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum, for any number of steps."""
    return MomentumSGD(RATE)


SETTING = Setting(RANKS, EPOCHS, sgd, normalized=False)


def simulate(dtype: str) -> Callable[[int], list[float]]:
    """Returns a training whose ranks send gradients of a dtype."""

    def run(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed)
        data, model, optimizer = digits.load(), networks.plain(), MomentumSGD(RATE)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def sent(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            return [tf.cast(tf.cast(g, dtype), tf.float32) for g in gradients]

        @tf.function
        def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
            parts = zip(tf.split(images, RANKS), tf.split(labels, RANKS), strict=True)
            by_rank = [sent(*part) for part in parts]
            # Added in float32, and rounded once on the way back.
            means = [tf.add_n(one) / RANKS for one in zip(*by_rank, strict=True)]
            means = [tf.cast(tf.cast(m, dtype), tf.float32) for m in means]
            optimizer.apply(means, model.trainable_variables)

        batch, curve = RANKS * PER_RANK, []
        images, labels = data.train
        for epoch in range(EPOCHS):
            order = tfdist.data.epoch_order(len(images), seed=seed, epoch=epoch)
            for step in range(SETTING.steps_per_epoch):
                rows = order[step * batch : (step + 1) * batch]
                train_step(tf.constant(images[rows]), tf.constant(labels[rows]))
            found = np.argmax(model(data.test[0]).numpy(), axis=1)
            curve.append(100 * float(np.mean(found == data.test[1])))
        return curve

    return run


def on_ranks() -> dict[str, float]:
    """Trains with both; returns accuracies, bytes, and the error of one average."""

    def bytes_sent() -> int:
        return sum(link["data_bytes_sent"] for link in native.counters()["links"])

    accuracies, counts = {}, []
    for name, compression in ((SINGLE, None), (HALF, "fp16")):
        before = bytes_sent()
        accuracy = train_on_ranks(SETTING, compression=compression)
        accuracies[f"accuracy, {name}"] = accuracy
        counts.append(bytes_sent() - before)
    own = np.random.default_rng(tfdist.rank()).normal(size=10_000)
    variable, found = tf.Variable(own.astype("float32")), []
    for compression in (None, "fp16"):
        with tfdist.DistributedGradientTape(compression=compression) as tape:
            loss = tf.reduce_sum(tf.square(variable)) / 2
        found.append(tape.gradient(loss, [variable])[0].numpy())
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    return {**accuracies, SHARE: counts[1] / counts[0], ERROR: float(error)}


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares accuracies, bytes and the error."""
    difference = abs(accuracy[SINGLE] - accuracy[HALF])
    checks = [at_most("difference of the accuracies", difference, 0.7, " points")]
    if on_ranks is not None:
        share, error = on_ranks[SHARE], on_ranks[ERROR]
        checks += [
            at_least(SHARE, share, 0.48, is_of_ranks=True),
            at_most(SHARE, share, 0.52, is_of_ranks=True),
            at_most(ERROR, error, 1e-3, is_of_ranks=True),
        ]
    return checks


STUDY = Study(
    name="half_precision",
    title="Gradients in half precision",
    claim="Gradients that are sent as float16 halve the bytes and keep the accuracy",
    source="Akiba et al. 2017, section 4 (arXiv:1711.04325)",
    workload=(
        f"digits, 3 hidden layers of 128 units, SGD with momentum 0.9 and rate {RATE}, "
        f"{EPOCHS} epochs, {RANKS} ranks with {PER_RANK} samples each"
    ),
    runs={SINGLE: simulate(SINGLE), HALF: simulate(HALF)},
    judge=judge,
    ranks=RANKS,
    on_ranks=on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
