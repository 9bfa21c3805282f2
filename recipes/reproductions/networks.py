"""The two networks of the reproductions."""

from typing import Any

import digits
import keras
from keras import ops

MOMENTUM = 0.9  # of the moving statistics, by default


@keras.saving.register_keras_serializable(package="tfdist_reproductions")
class GroupedBatchNormalization(keras.layers.Layer):
    """Batch normalization of several ranks, simulated in one process.

    A batch consists of equal batches of all ranks. Each rank normalizes its own batch,
    and has its own moving statistics. In evaluation, all ranks use the combined
    statistics. The combined mean is the mean of the means. The combined variance is the
    mean of (variance + mean^2) minus the square of the combined mean.

    Args:
        ranks: number of ranks.
        momentum: weight of the old moving statistics in a step; with 0, they are the
            statistics of the last batch.
    """

    def __init__(self, ranks: int, momentum: float = MOMENTUM, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = ranks
        self.momentum = momentum

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Creates scale, shift and the moving statistics of each rank."""
        features = shape[-1]
        self.gamma = self.add_weight(shape=(features,), initializer="ones")
        self.beta = self.add_weight(shape=(features,), initializer="zeros")
        options = {"shape": (self.ranks, features), "trainable": False}
        self.means = self.add_weight(initializer="zeros", **options)
        self.variances = self.add_weight(initializer="ones", **options)

    def call(self, x: Any, training: bool = False) -> Any:
        """Normalizes a batch of shape [ranks * n, features]."""
        if training:
            groups = ops.reshape(x, (self.ranks, -1, x.shape[-1]))
            mean, variance = ops.moments(groups, axes=[1])
            for moving, new in ((self.means, mean), (self.variances, variance)):
                old = self.momentum * moving
                moving.assign(old + (1 - self.momentum) * new)
            mean, variance = mean[:, None], variance[:, None]
        else:
            groups = x
            mean = ops.mean(self.means, axis=0)
            squares = ops.mean(self.variances + ops.square(self.means), axis=0)
            variance = squares - ops.square(mean)
        scale = self.gamma / ops.sqrt(variance + 1e-3)
        return ops.reshape((groups - mean) * scale + self.beta, ops.shape(x))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments in Keras's format."""
        own = {"ranks": self.ranks, "momentum": self.momentum}
        return {**super().get_config(), **own}


def plain() -> keras.Model:
    """Returns a network of three hidden layers of 128 units."""
    layers: list[Any] = [keras.Input((digits.PIXELS,))]
    layers += [keras.layers.Dense(128, "relu") for _ in range(3)]
    return keras.Sequential([*layers, keras.layers.Dense(digits.CLASSES)])


def normalized(
    simulated_ranks: int | None,
    *,
    pixels: int = digits.PIXELS,
    momentum: float = MOMENTUM,
) -> keras.Model:
    """Returns a network of five hidden layers of 96 units with batch normalization.

    Args:
        simulated_ranks: number of ranks that this process simulates; None for a process
            that is a rank itself.
        pixels: pixels of an image.
        momentum: momentum of the moving statistics.
    """
    layers: list[Any] = [keras.Input((pixels,))]
    for _ in range(5):
        layers.append(keras.layers.Dense(96, use_bias=False))
        if simulated_ranks is None:
            layers.append(keras.layers.BatchNormalization(momentum=momentum))
        else:
            layers.append(GroupedBatchNormalization(simulated_ranks, momentum))
        layers.append(keras.layers.Activation("relu"))
    return keras.Sequential([*layers, keras.layers.Dense(digits.CLASSES)])
