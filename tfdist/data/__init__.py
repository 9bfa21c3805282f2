"""Input data: each rank's share of a data set, with equally many steps on all ranks.

Example:
    >>> import numpy as np, tfdist
    >>> tfdist.init()
    >>> batches = tfdist.data.shard(np.arange(10), batch_size=4, shuffle=True)
"""

from tfdist.data._batch_schedule import BatchSchedule
from tfdist.data._epoch_order import epoch_order, positions
from tfdist.data._global_batches import global_batches
from tfdist.data._records import Records
from tfdist.data._samples_of_step import samples_of_step
from tfdist.data._scatter import scatter
from tfdist.data._shard import batch_sizes, seed, shard

__all__ = [
    "BatchSchedule",
    "Records",
    "batch_sizes",
    "epoch_order",
    "global_batches",
    "positions",
    "samples_of_step",
    "scatter",
    "seed",
    "shard",
]
