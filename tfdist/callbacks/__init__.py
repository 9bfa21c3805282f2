"""Keras callbacks for training on several ranks.

`model.fit` needs five changed lines: start, share of the data, optimizer, and two
callbacks. All ranks run the same script.

Example:
    >>> import keras, numpy as np
    >>> import tfdist
    >>> tfdist.init()                                                    # 1
    >>> x, y = np.random.rand(64, 4), np.random.rand(64, 1)
    >>> data = tfdist.data.shard((x, y), batch_size=8, shuffle=True)     # 2
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(
    ...     tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),      # 3
    ...     loss="mse",
    ...     jit_compile=False)                                           # 4
    >>> history = model.fit(data, epochs=2, verbose=0, callbacks=[
    ...     tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()
    ... ])                                                               # 5

Put `MetricAverage` before callbacks that look at metrics. Every callback here checks
before the first step that the model's gradients will be reduced.
"""

from tfdist.callbacks.broadcast_initial_state import BroadcastInitialState
from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.callbacks.learning_rate_scale import LearningRateScale
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdist.callbacks.metric_average import MetricAverage

__all__ = [
    "BroadcastInitialState",
    "Checkpoint",
    "LearningRateScale",
    "LearningRateWarmup",
    "MetricAverage",
]
