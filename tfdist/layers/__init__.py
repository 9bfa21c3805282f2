"""Statistics and random numbers of layers when training on more than one rank.

Example:
    >>> import keras, tfdist
    >>> tfdist.init()
    >>> model = keras.Sequential([
    ...     keras.Input((8, 8, 3)),
    ...     keras.layers.Conv2D(4, 3, use_bias=False),
    ...     tfdist.layers.SyncBatchNormalization(),
    ...     keras.layers.ReLU(),
    ... ])
"""

from tfdist.layers.estimation import estimate_moving_statistics
from tfdist.layers.seed_generators import broadcast_seed_generators
from tfdist.layers.statistics import combine_moving_statistics
from tfdist.layers.synchronized import (
    SyncBatchNormalization,
    is_synchronized,
    synchronize_batch_normalization,
)

__all__ = [
    "SyncBatchNormalization",
    "broadcast_seed_generators",
    "combine_moving_statistics",
    "estimate_moving_statistics",
    "is_synchronized",
    "synchronize_batch_normalization",
]
