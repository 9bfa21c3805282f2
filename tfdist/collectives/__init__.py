"""The collective operations and their gradients.

All operations work eagerly, in a `tf.function` and in a `tf.while_loop`, and at size 1
without a launcher. Eager calls of the same operation are matched across ranks in
program order. In a `tf.function`, operations overlap with computation and with each
other. Each rank may run them in a different order, because calls are matched by name.
In `Dataset.map`, operations must be called one after the other, so do not use
`num_parallel_calls`.
"""

from tfdist.collectives._allreduce import (
    allreduce,
    grouped_allreduce,
)
from tfdist.collectives._alltoall import alltoall
from tfdist.collectives._barrier import barrier
from tfdist.collectives._broadcast import broadcast, grouped_broadcast
from tfdist.collectives._gather import allgather, gather
from tfdist.collectives._join import after_join, join, join_all
from tfdist.collectives._reduce import reduce, reduce_scatter
from tfdist.collectives._scatter import scatter
from tfdist.collectives._send_recv import recv, send
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import adjoints as adjoints  # registers the gradients

__all__ = [
    "ReduceOp",
    "after_join",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "grouped_allreduce",
    "grouped_broadcast",
    "join",
    "join_all",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
