"""Data-parallel training of Keras 3 models on TensorFlow, on several processes.

Names are loaded when first used, so that the launcher and the tests of the core
start without importing TensorFlow.

Example:
    >>> import tfdist
    >>> tfdist.init()  # one process, unless a launcher started several
    >>> tfdist.size()
    1
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name → module that defines it.
_HOME = {
    "init": "_runtime",
    "shutdown": "_runtime",
    "is_initialized": "_runtime",
    "rank": "_runtime",
    "size": "_runtime",
    "local_rank": "_runtime",
    "local_size": "_runtime",
    "cross_rank": "_runtime",
    "cross_size": "_runtime",
    "ProcessSet": "_process_sets",
    "add_process_set": "_process_sets",
    "remove_process_set": "_process_sets",
    "process_sets": "_process_sets",
    "ReduceOp": "collectives",
    "allreduce": "collectives",
    "grouped_allreduce": "collectives",
    "allgather": "collectives",
    "broadcast": "collectives",
    "barrier": "collectives",
    "join": "collectives",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "gather": "collectives",
    "scatter": "collectives",
    "alltoall": "collectives",
    "send": "collectives",
    "recv": "collectives",
    "broadcast_variables": "variables",
    "broadcast_object": "objects",
    "allgather_object": "objects",
    "evaluate": "evaluation",
    "predict": "prediction",
    "restore": "restoration",
    "DistributedGradientTape": "tape",
    "DistributedOptimizer": "optimizer",
    "pin_gpu": "device",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "EvictedError": "errors",
    "ThreadError": "errors",
    "TimeoutError": "errors",
    "NotInitializedError": "errors",
}
_SUBMODULES = ("callbacks", "data", "errors", "layers", "optimizers")

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "EvictedError",
    "MismatchError",
    "NotInitializedError",
    "ProcessSet",
    "RankFailedError",
    "ReduceOp",
    "ThreadError",
    "TimeoutError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "data",
    "errors",
    "evaluate",
    "gather",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "layers",
    "local_rank",
    "local_size",
    "optimizers",
    "pin_gpu",
    "predict",
    "process_sets",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "remove_process_set",
    "restore",
    "scatter",
    "send",
    "shutdown",
    "size",
]

if TYPE_CHECKING:
    from tfdist import callbacks, data, errors, layers, optimizers
    from tfdist._process_sets import (
        ProcessSet,
        add_process_set,
        process_sets,
        remove_process_set,
    )
    from tfdist._runtime import (
        cross_rank,
        cross_size,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from tfdist.collectives import (
        ReduceOp,
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        gather,
        grouped_allreduce,
        join,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from tfdist.device import pin_gpu
    from tfdist.errors import (
        EvictedError,
        MismatchError,
        NotInitializedError,
        RankFailedError,
        ThreadError,
        TimeoutError,
    )
    from tfdist.evaluation import evaluate
    from tfdist.objects import allgather_object, broadcast_object
    from tfdist.optimizer import DistributedOptimizer
    from tfdist.prediction import predict
    from tfdist.restoration import restore
    from tfdist.tape import DistributedGradientTape
    from tfdist.variables import broadcast_variables


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
