"""Keras callbacks for training on several ranks.

A script that calls `model.fit` needs five changes: import, initialization, sharded
data, optimizer, and callbacks. All ranks run the same script.

Example:
    >>> import keras, numpy as np
    >>> import tfdist                                                    # 1
    >>> tfdist.init()                                                    # 2
    >>> x, y = np.random.rand(64, 4), np.random.rand(64, 1)
    >>> data = tfdist.data.shard((x, y), batch_size=8, shuffle=True)     # 3
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(                                                   # 4
    ...     tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    ...     loss="mse")
    >>> history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[
    ...     tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()
    ... ])                                                               # 5

Order of the list:

- `UnevenData` first, if ranks have different numbers of batches;
- `MetricAverage` before callbacks that use metrics;
- `CombineMovingStatistics` (for batch normalization) before callbacks that save;
- `StopTogether` last, if a single rank may stop.

Use `RankZeroOnly` for callbacks of Keras, or your own, that write files. Before the
first step, the tfdist callbacks check that the model's gradients will be reduced, and
that the callback lists of all ranks match (docs/callbacks.md). If the model's optimizer
has a `process_set`, "all ranks" means the ranks of that set, and "rank 0" its lowest
rank.
"""

from tfdist.callbacks.broadcast_initial_state import BroadcastInitialState
from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.callbacks.combine_moving_statistics import CombineMovingStatistics
from tfdist.callbacks.elastic import Elastic
from tfdist.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdist.callbacks.learning_rate_scale import LearningRateScale
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdist.callbacks.metric_average import MetricAverage
from tfdist.callbacks.progress import Progress
from tfdist.callbacks.rank_zero_only import RankZeroOnly
from tfdist.callbacks.stop_on_signal import StopOnSignal
from tfdist.callbacks.stop_together import StopTogether
from tfdist.callbacks.stragglers import Stragglers
from tfdist.callbacks.uneven_data import UnevenData

__all__ = [
    "BroadcastInitialState",
    "Checkpoint",
    "CombineMovingStatistics",
    "Elastic",
    "GradientNoiseScale",
    "LearningRateScale",
    "LearningRateWarmup",
    "MetricAverage",
    "Progress",
    "RankZeroOnly",
    "StopOnSignal",
    "StopTogether",
    "Stragglers",
    "UnevenData",
]
