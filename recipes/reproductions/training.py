"""One training of the reproductions, with simulated or with real ranks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import digits
import keras
import networks
import tensorflow as tf

import tfdist
from tfdist.optimizers import Warmup

PER_RANK = 32  # samples of a rank in a step


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        ranks: number of ranks, each with `PER_RANK` samples in a step.
        epochs: length of the training.
        optimizer: function that returns the optimizer, for a number of steps per epoch.
        normalized: whether the network has batch normalization.
    """

    ranks: int
    epochs: int
    optimizer: Callable[[int], keras.optimizers.Optimizer]
    normalized: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch; the remaining samples are left out."""
        return digits.TRAIN // (self.ranks * PER_RANK)


def rates(peak: float, epochs: int, steps: int, *, warmup: int = 0) -> Warmup:
    """Returns a rate that becomes a tenth after 60 % and 85 % of the training.

    Args:
        peak: the first rate, after a warm-up.
        epochs: length of the training.
        steps: steps of an epoch.
        warmup: epochs in which the rate rises from 0.
    """
    ends = [round(part * epochs * steps) - 1 for part in (0.6, 0.85)]
    falling = keras.optimizers.schedules.PiecewiseConstantDecay(
        ends, [peak, peak / 10, peak / 100]
    )
    return Warmup(falling, warmup * steps)


def simulate(setting: Setting, seed: int) -> list[float]:
    """Trains with all ranks in one process.

    Returns:
        The test accuracy of each epoch, in percent.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    data = digits.load()
    model = (
        networks.normalized(setting.ranks) if setting.normalized else networks.plain()
    )
    optimizer = setting.optimizer(setting.steps_per_epoch)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        # The mean over all samples is the average of the means of the ranks.
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    @tf.function
    def accuracy(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(model(images, training=False), axis=1, output_type=tf.int32)
        return tf.reduce_mean(tf.cast(found == labels, tf.float32))

    batch, curve = setting.ranks * PER_RANK, []
    images, labels = data.train
    for epoch in range(setting.epochs):
        order = tfdist.data.epoch_order(len(images), seed=seed, epoch=epoch)
        for step in range(setting.steps_per_epoch):
            rows = order[step * batch : (step + 1) * batch]
            train_step(tf.constant(images[rows]), tf.constant(labels[rows]))
        curve.append(100 * float(accuracy(*map(tf.constant, data.test))))
    return curve


def train_on_ranks(setting: Setting, **options: Any) -> float:
    """Trains on the ranks of this job.

    Args:
        setting: the training, for as many ranks as the job has.
        **options: arguments of `tfdist.DistributedOptimizer`.

    Returns:
        The test accuracy after the last epoch, in percent.

    Raises:
        ValueError: the job has another number of ranks.
    """
    if tfdist.size() != setting.ranks:
        raise ValueError(f"Expected {setting.ranks} ranks, got {tfdist.size()}.")
    keras.utils.set_random_seed(0)
    data = digits.load()
    model = networks.normalized(None) if setting.normalized else networks.plain()
    optimizer = setting.optimizer(setting.steps_per_epoch)
    model.compile(
        tfdist.DistributedOptimizer(optimizer, **options),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    batch = setting.ranks * PER_RANK
    history = model.fit(
        tfdist.data.global_batches(data.train, global_batch=batch, seed=0),
        epochs=setting.epochs,
        verbose=0,
        validation_data=data.test,
        callbacks=[
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.CombineMovingStatistics(),
            tfdist.callbacks.MetricAverage(),
        ],
    )
    return 100 * history.history["val_accuracy"][-1]
