"""Optimizers and schedules for large batches, as Keras classes.

Import `tfdist.optimizers` before loading a model that was saved with one of these
classes. Keras finds classes of other packages only if their module is imported.

Example:
    >>> import tfdist
    >>> from tfdist.optimizers import LARS, Warmup, scaled_rate
    >>> peak = scaled_rate(0.1, global_batch=1024)
    >>> peak
    0.4
    >>> tfdist.init()
    >>> optimizer = tfdist.DistributedOptimizer(
    ...     LARS(Warmup(peak, warmup_steps=500), weight_decay=1e-4))
"""

from tfdist.optimizers.lamb import LAMB
from tfdist.optimizers.lars import LARS
from tfdist.optimizers.momentum_sgd import MomentumSGD
from tfdist.optimizers.rates import scaled_rate, sgd_share, warmup_factor
from tfdist.optimizers.rmsprop_warmup import RMSpropWarmup
from tfdist.optimizers.warmup import Warmup

__all__ = [
    "LAMB",
    "LARS",
    "MomentumSGD",
    "RMSpropWarmup",
    "Warmup",
    "scaled_rate",
    "sgd_share",
    "warmup_factor",
]
