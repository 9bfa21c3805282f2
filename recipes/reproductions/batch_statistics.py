"""Moving statistics have to be combined over the ranks, by the law of total variance.

python recipes/reproductions/batch_statistics.py
"""

import functools
from collections.abc import Callable, Mapping

import digits
import keras
import networks
import numpy as np
import study
from study import Check, Study, at_least, at_most
from training import PER_RANK, accuracy_of, train

import tfdist
from tfdist.optimizers import MomentumSGD

RANKS, EPOCHS, RATE = 11, 14, 0.1
COMBINED, FIRST = "statistics of all ranks", "statistics of rank 0"


def shards(seed: int, epoch: int) -> np.ndarray:
    """Returns the samples of each rank in an epoch, of shape [ranks, samples].

    The data are sorted by label and cut, so that a rank has one or two classes.
    """
    by_label = np.argsort(digits.load().train[1], kind="stable")
    order = np.random.default_rng([seed, epoch])
    return order.permuted(by_label.reshape(RANKS, -1), axis=1)


def steps_of(parts: np.ndarray) -> list[np.ndarray]:
    """Returns the samples of all ranks in each step."""
    begins = range(0, parts.shape[1], PER_RANK)
    return [parts[:, begin : begin + PER_RANK].reshape(-1) for begin in begins]


@functools.cache
def accuracies(seed: int) -> dict[str, list[float]]:
    """Trains once; returns the accuracies with each kind of statistics."""
    keras.utils.set_random_seed(seed)
    model = networks.normalized(RANKS)
    optimizer = MomentumSGD(RATE, weight_decay=1e-4)
    kind = networks.GroupedBatchNormalization
    moving = [
        variable
        for layer in model.layers
        if isinstance(layer, kind)
        for variable in (layer.means, layer.variances)
    ]
    curves: dict[str, list[float]] = {COMBINED: [], FIRST: []}
    epochs = (steps_of(shards(seed, epoch)) for epoch in range(EPOCHS))
    for _ in train(model, optimizer, epochs):
        curves[COMBINED].append(accuracy_of(model))
        kept = [variable.numpy() for variable in moving]
        for variable, values in zip(moving, kept, strict=True):
            variable.assign(np.broadcast_to(values[:1], values.shape))
        curves[FIRST].append(accuracy_of(model))
        for variable, values in zip(moving, kept, strict=True):
            variable.assign(values)
    return curves


def run_with(name: str) -> Callable[[int], list[float]]:
    """Returns a function that runs with one kind of statistics."""
    return lambda seed: accuracies(seed)[name]


def on_ranks() -> dict[str, float]:
    """Compares the statistics combined over the ranks with those of all data."""
    layer = keras.layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((digits.PIXELS,)), layer])
    images = digits.load().train[0][shards(0, 0)]
    model(images[tfdist.rank()], training=True)  # sets the moving statistics
    tfdist.layers.combine_moving_statistics(model)
    whole = images.reshape(-1, digits.PIXELS)
    pairs = ((layer.moving_mean, whole.mean(0)), (layer.moving_variance, whole.var(0)))
    own = max(float(np.abs(found.numpy() - right).max()) for found, right in pairs)
    # Results have to be numbers, so compare the values, not a hash.
    means = tfdist.allgather(layer.moving_mean.value[None]).numpy()
    return {
        "error of the combined statistics": own,
        "difference between the ranks": float(np.ptp(means, axis=0).max()),
    }


def judge(
    accuracy: Mapping[str, float], on_ranks: Mapping[str, float] | None
) -> list[Check]:
    """Compares the accuracies and the statistics."""
    ahead = accuracy[COMBINED] - accuracy[FIRST]
    checks = [at_least("gain over the statistics of rank 0", ahead, 3, " points")]
    if on_ranks is not None:
        checks += [
            at_most(name, found, 1e-5, is_of_ranks=True)
            for name, found in on_ranks.items()
        ]
    return checks


STUDY = Study(
    name="batch_statistics",
    title="Statistics of batch normalization",
    claim=(
        "If the ranks have different data, the moving statistics of one rank do not "
        "fit the model. The statistics of all ranks, combined by the law of total "
        "variance, do."
    ),
    source="Akiba et al. 2017, section 3 (arXiv:1711.04325)",
    workload=(
        "digits sorted by label, 5 hidden layers of 96 units, batch normalization over "
        f"the {PER_RANK} samples of each of {RANKS} ranks, SGD with momentum 0.9, rate "
        f"{RATE} and weight decay 1e-4, {EPOCHS} epochs"
    ),
    runs={COMBINED: run_with(COMBINED), FIRST: run_with(FIRST)},
    judge=judge,
    ranks=RANKS,
    on_ranks=on_ranks,
)

if __name__ == "__main__":
    study.main(STUDY)
