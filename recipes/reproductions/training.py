"""A training run of the reproductions, with simulated or with real ranks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import digits
import keras
import networks
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.optimizers import MomentumSGD, Warmup, scaled_rate

PER_RANK = 32  # samples of a rank in a step
GradientFunction = Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting of a training run.

    Attributes:
        ranks: number of ranks, each with `PER_RANK` samples in a step.
        epochs: number of epochs.
        optimizer: function that returns the optimizer, for a number of steps per epoch.
        normalized: whether the network has batch normalization.
        load: function that returns the data. The network without batch normalization
            needs the default, the small digits.
        momentum: momentum of the moving statistics of batch normalization.
    """

    ranks: int
    epochs: int
    optimizer: Callable[[int], keras.optimizers.Optimizer]
    normalized: bool
    load: Callable[[], digits.Digits] = digits.load
    momentum: float = networks.MOMENTUM

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch; the remaining samples are not used."""
        return len(self.load().train[1]) // (self.ranks * PER_RANK)

    def network(self, simulated_ranks: int | None) -> keras.Model:
        """Returns the network; for the argument, see `networks.normalized`."""
        if not self.normalized:
            return networks.plain()
        pixels = self.load().train[0].shape[1]
        return networks.normalized(
            simulated_ranks, pixels=pixels, momentum=self.momentum
        )


def rates(peak: float, epochs: int, steps: int, *, warmup: int = 0) -> Warmup:
    """Returns a rate that is divided by 10 after 60 % and after 85 % of training.

    Args:
        peak: the rate after the warm-up.
        epochs: number of epochs.
        steps: steps in an epoch.
        warmup: epochs in which the rate rises from 0.
    """
    ends = [round(part * epochs * steps) - 1 for part in (0.6, 0.85)]
    falling = keras.optimizers.schedules.PiecewiseConstantDecay(
        ends, [peak, peak / 10, peak / 100]
    )
    return Warmup(falling, warmup * steps)


def scaled_setting(
    ranks: int,
    rate: float,
    epochs: int,
    *,
    warmup: int,
    load: Callable[[], digits.Digits] = digits.load,
) -> Setting:
    """Returns a setting with SGD, whose rate is scaled to the number of ranks.

    Args:
        ranks: number of ranks.
        rate: the rate of one rank.
        epochs: number of epochs.
        warmup: epochs in which the rate rises from 0.
        load: function that returns the data.
    """
    peak = scaled_rate(rate, global_batch=ranks * PER_RANK, base_batch=PER_RANK)

    def optimizer(steps_per_epoch: int) -> keras.optimizers.Optimizer:
        falling = rates(peak, epochs, steps_per_epoch, warmup=warmup)
        return MomentumSGD(falling, weight_decay=1e-4)

    return Setting(ranks, epochs, optimizer, normalized=True, load=load)


def gradients_of(model: keras.Model) -> GradientFunction:
    """Returns a function from images and labels to the gradients of the mean loss."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return gradients


def accuracy_of(model: keras.Model, data: digits.Digits | None = None) -> float:
    """Returns the test accuracy, in percent; default: of the small digits."""
    images, labels = (data or digits.load()).test
    found = np.argmax(model(images, training=False).numpy(), axis=1)
    return 100 * float(np.mean(found == labels))


def shuffled(
    batch: int, epochs: int, seed: int, total: int = digits.TRAIN
) -> Iterator[list[np.ndarray]]:
    """Yields the samples of each step of an epoch, for all epochs."""
    for epoch in range(epochs):
        order = tfdist.data.epoch_order(total, seed=seed, epoch=epoch)
        yield list(order[: len(order) // batch * batch].reshape(-1, batch))


def train(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    epochs: Iterable[list[np.ndarray]],
    gradients: GradientFunction | None = None,
    data: digits.Digits | None = None,
) -> Iterator[None]:
    """Trains, and yields after each epoch.

    Args:
        model: the network.
        optimizer: its optimizer.
        epochs: the samples of each step, by epoch.
        gradients: function that returns the gradients of a step. Default: the gradients
            of the mean loss, which equal the average over ranks with equal batches.
        data: the data; default: the small digits.
    """
    images, labels = (data or digits.load()).train
    variables = model.trainable_variables
    gradients = gradients or gradients_of(model)
    optimizer.build(variables)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        optimizer.apply(gradients(images, labels), variables)

    for steps in epochs:
        for rows in steps:
            train_step(tf.constant(images[rows]), tf.constant(labels[rows]))
        yield


def simulate(setting: Setting, seed: int) -> list[float]:
    """Trains with all ranks in one process.

    Returns:
        The test accuracy of each epoch, in percent.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model, data = setting.network(setting.ranks), setting.load()
    optimizer = setting.optimizer(setting.steps_per_epoch)
    batch, total = setting.ranks * PER_RANK, len(data.train[1])
    epochs = shuffled(batch, setting.epochs, seed, total)
    steps = train(model, optimizer, epochs, data=data)
    return [accuracy_of(model, data) for _ in steps]


def train_on_ranks(setting: Setting, **options: Any) -> float:
    """Trains on the ranks of this job, as `fit_on_ranks` does.

    Returns:
        The test accuracy after the last epoch, in percent.
    """
    _, accuracy = fit_on_ranks(setting, **options)
    return accuracy


def fit_on_ranks(setting: Setting, **options: Any) -> tuple[keras.Model, float]:
    """Trains on the ranks of this job.

    Args:
        setting: the setting, for as many ranks as the job has.
        **options: arguments of `tfdist.DistributedOptimizer`.

    Returns:
        The model, and the test accuracy after the last epoch, in percent.

    Raises:
        ValueError: the job has a different number of ranks.
    """
    if tfdist.size() != setting.ranks:
        raise ValueError(f"Expected {setting.ranks} ranks, got {tfdist.size()}.")
    keras.utils.set_random_seed(0)
    data, model = setting.load(), setting.network(None)
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
    return model, 100 * history.history["val_accuracy"][-1]
