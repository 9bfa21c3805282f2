"""`horovod.tensorflow` by its names, on tfdist.

A script's `import horovod.tensorflow as hvd` becomes this module with
`tfdistrun --horovod`, or by hand: `import tfdist.horovod.tensorflow as hvd`.

Where Horovod's behaviour under Keras 3 is missing or wrong, this is right instead:
tapes and `broadcast_variables` take Keras variables, sparse gradients come with every
index once, an average counts the ranks that call it. Nothing is pickled, unless all
ranks ask for it (`TFDIST_OBJECTS=pickle`).

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
