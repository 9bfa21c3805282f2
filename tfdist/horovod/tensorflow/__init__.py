"""`horovod.tensorflow` by its names, on tfdist.

A script's `import horovod.tensorflow as hvd` becomes this module with
`tfdistrun --horovod`, or by hand: `import tfdist.horovod.tensorflow as hvd`.

Where Horovod's behaviour under Keras 3 is missing or wrong, this is right instead:
tapes and `broadcast_variables` take Keras variables, sparse gradients come with every
index once, an average counts the ranks that call it, gradients of allgather and
broadcast are sums. Nothing is pickled.

Example:
    >>> import tfdist.horovod.tensorflow as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
"""

from tfdist.horovod.common.util import gpu_available
from tfdist.horovod.tensorflow import elastic
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
from tfdist.horovod.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    handle_average_backwards_compatibility,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
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
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
