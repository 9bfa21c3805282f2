"""The TensorFlow operations of tfdist: loads `libtfdist_tf.so` once.

The library is built against one version of TensorFlow, whose C++ interface changes
with every version. Another version is refused before any code of the library runs.
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

# Ranks may run and trace these in any order: the core agrees on one. A barrier keeps
# its place in the program.
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

    They come from `libtfdist_tf.so`, or from the engine that `TFDIST_ENGINE` names.

    Raises:
        ImportError: the libraries are not built, or for another TensorFlow.
    """
    engine = engines.chosen()
    return native_ops() if engine is None else engine.operations()


@functools.cache
def native_ops() -> ModuleType:
    """Returns the generated functions of `libtfdist_tf.so`, whatever the engine.

    Raises:
        ImportError: as `ops`.
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

    Read from the file, not from the loaded library: loading runs its code.
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
    """Excludes our operations from the automatic order of stateful operations.

    A stateful operation is neither folded nor merged nor pruned, but TensorFlow chains
    such operations in the order in which they were traced: nothing would overlap, and
    ranks that trace in different orders would wait for each other forever. The list of
    exceptions is private; without it the operations are chained.
    """
    known = getattr(module, _ORDER_FREE, None)
    if known is None:
        _logger.warning(
            "TensorFlow %s has no auto_control_deps.%s: the operations of tfdist run "
            "one after another in the order of the program, which must then be the "
            "same on all ranks, and do not overlap with computation.",
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
