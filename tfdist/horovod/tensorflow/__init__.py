"""`horovod.tensorflow`: Horovod's names, implemented with tfdist.

With `tfdistrun --horovod`, a script's `import horovod.tensorflow as hvd` imports this
module. To do so without the flag, write `import tfdist.horovod.tensorflow as hvd`.

This module also fixes behavior that is missing or wrong in Horovod under Keras 3: tapes
and `broadcast_variables` accept Keras variables, sparse gradients contain every index
once, and an average is divided by the number of ranks that call the operation. Nothing
is pickled unless all ranks set `TFDIST_OBJECTS=pickle`.

Example:
    >>> import tfdist.horovod.tensorflow as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
"""

from tfdist.horovod.tensorflow import elastic, mpi_ops
from tfdist.horovod.tensorflow.compression import Compression
from tfdist.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from tfdist.horovod.tensorflow.graph_mode import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
)
from tfdist.horovod.tensorflow.mpi_ops import *  # noqa: F403
from tfdist.horovod.tensorflow.optimizer import DistributedOptimizer
from tfdist.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from tfdist.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from tfdist.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from tfdist.horovod.tensorflow.util import _executing_eagerly as _executing_eagerly

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "allreduce",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += mpi_ops.__all__
