"""Data-parallel training of Keras 3 models on TensorFlow with several processes.

Names are loaded on first use, so that the launcher and the tests of the core start
without importing TensorFlow.

Example:
    >>> import tfdist
    >>> tfdist.init()  # one process, unless a launcher started several
    >>> tfdist.size()
    1
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.core.version import __version__

# Defining module → public names.
_PUBLIC = {
    "core.world": ("init", "shutdown"),
    "core.runtime": (
        "is_initialized",
        "rank",
        "size",
        "local_rank",
        "local_size",
        "cross_rank",
        "cross_size",
    ),
    "core.process_sets": (
        "ProcessSet",
        "add_process_set",
        "remove_process_set",
        "process_sets",
    ),
    "collectives": (
        "ReduceOp",
        "allreduce",
        "grouped_allreduce",
        "allgather",
        "broadcast",
        "barrier",
        "join",
        "reduce",
        "reduce_scatter",
        "gather",
        "scatter",
        "alltoall",
        "send",
        "recv",
    ),
    "collectives.variables": ("broadcast_variables",),
    "collectives.objects": ("broadcast_object", "allgather_object"),
    "launch.run_function": ("run",),
    "gradients.tape": ("DistributedGradientTape",),
    "training.optimizer": ("DistributedOptimizer",),
    "training.evaluate": ("evaluate",),
    "training.predict": ("predict",),
    "training.checkpoint_files": ("newest_checkpoint",),
    "training.restore": ("restore",),
    "training.device": ("pin_gpu",),
    "errors": (
        "MismatchError",
        "RankFailedError",
        "EvictedError",
        "ThreadError",
        "TimeoutError",
        "NotInitializedError",
    ),
}
_SUBMODULES = ("callbacks", "data", "elastic", "errors", "layers", "optimizers")
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(["__version__", *_HOME, *_SUBMODULES])

if TYPE_CHECKING:
    from tfdist import callbacks, data, elastic, errors, layers, optimizers
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
    from tfdist.collectives.objects import allgather_object, broadcast_object
    from tfdist.collectives.variables import broadcast_variables
    from tfdist.core.process_sets import (
        ProcessSet,
        add_process_set,
        process_sets,
        remove_process_set,
    )
    from tfdist.core.runtime import (
        cross_rank,
        cross_size,
        is_initialized,
        local_rank,
        local_size,
        rank,
        size,
    )
    from tfdist.core.world import init, shutdown
    from tfdist.errors import (
        EvictedError,
        MismatchError,
        NotInitializedError,
        RankFailedError,
        ThreadError,
        TimeoutError,
    )
    from tfdist.gradients.tape import DistributedGradientTape
    from tfdist.launch.run_function import run
    from tfdist.training.checkpoint_files import newest_checkpoint
    from tfdist.training.device import pin_gpu
    from tfdist.training.evaluate import evaluate
    from tfdist.training.optimizer import DistributedOptimizer
    from tfdist.training.predict import predict
    from tfdist.training.restore import restore


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
