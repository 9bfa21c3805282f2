"""Horovod's callbacks for `model.fit`."""

from tfdist.horovod._keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)
from tfdist.horovod._keras.rates import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
