"""The TensorFlow operations of tfdist: loads `libtfdist_tf.so` once.

The library is built for one version of TensorFlow, because TensorFlow's C++ interface
changes with every version. With a different version, an error is raised before any code
of the library runs.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import auto_control_deps

from tfdist.collectives.tf_ops.call_order import chain_calls, claim_when_called
from tfdist.core import engines, native

_logger = logging.getLogger("tfdist")

LIBRARY_PATH = native.LIBRARY_FOLDER / "libtfdist_tf.so"
REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps tfdist "
    "(or, in the source folder, pip install --no-build-isolation -e .)"
)

# Ranks may run and trace these operations in any order, and the core agrees on one
# order. A barrier stays in program order.
UNORDERED_OPS = frozenset(
    {
        *("TfdistAllreduce", "TfdistReduce", "TfdistReduceScatter"),
        *("TfdistAllgather", "TfdistGather", "TfdistScatter", "TfdistAlltoall"),
        *("TfdistBroadcast", "TfdistSend", "TfdistRecv", "TfdistTopology"),
        *("TfdistCountReduced", "TfdistFail"),
    }
)
_ORDER_FREE = "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS"


@functools.cache
def ops() -> Any:
    """Returns the functions of the operations, e.g. `ops().tfdist_allreduce`.

    They come from `libtfdist_tf.so`, or from the engine selected by `TFDIST_ENGINE`.

    Raises:
        ImportError: the libraries are not built, or were built for a different
            TensorFlow.
    """
    engine = engines.chosen()
    return native_ops() if engine is None else engine.operations()


@functools.cache
def native_ops() -> ModuleType:
    """Returns the generated functions of `libtfdist_tf.so`, regardless of the engine.

    Raises:
        ImportError: as for `ops`.
    """
    native.library()  # first, by absolute path: both libraries then share one state
    check_built_for(LIBRARY_PATH, tf.__version__)
    module = _load(LIBRARY_PATH)
    release_from_order(auto_control_deps)
    chain_calls(auto_control_deps)
    claim_when_called(AtomicFunction)
    return module


def built_for(path: Path) -> str:
    """Returns the version of TensorFlow that the library at `path` was built for.

    The version is read from the file, because loading the library would run its code.
    """
    if not path.is_file():
        raise ImportError(
            f"the TensorFlow operations of tfdist are not built: expected {path}; "
            f"build them: {REBUILD}"
        )
    found = re.search(
        rb"tfdist ops built for TensorFlow ([0-9A-Za-z.+-]+);", path.read_bytes()
    )
    return found.group(1).decode() if found else "unknown"


def check_built_for(path: Path, running: str) -> None:
    """Raises ImportError unless the library was built for TensorFlow `running`."""
    built = built_for(path)
    if built != running:
        raise ImportError(_refusal(built, running))


def release_from_order(module: Any) -> None:
    """Excludes tfdist operations from TensorFlow's order of stateful operations.

    A stateful operation is neither folded nor merged nor pruned, but TensorFlow chains
    stateful operations in the order in which they were traced. Then nothing would
    overlap, and ranks that trace in different orders would wait for each other forever.
    TensorFlow's list of exceptions is private. If it is missing, the operations are
    chained.
    """
    known = getattr(module, _ORDER_FREE, None)
    if known is None:
        _logger.warning(
            "TensorFlow %s has no auto_control_deps.%s: the operations of tfdist run "
            "one after another in program order, which must then be the same on all "
            "ranks, and do not overlap with computation.",
            tf.__version__,
            _ORDER_FREE,
        )
        return
    setattr(module, _ORDER_FREE, frozenset(known) | UNORDERED_OPS)


def _load(path: Path) -> ModuleType:
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.NotFoundError, OSError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise ImportError(
            f"{_refusal(built_for(path), tf.__version__)} ({reason})"
        ) from None


def _refusal(built: str, running: str) -> str:
    return (
        f"the operations of tfdist were built for TensorFlow {built} and do not load "
        f"into TensorFlow {running}. Rebuild them: {REBUILD}"
    )
