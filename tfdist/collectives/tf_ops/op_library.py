"""Loads the library of tfdist's TensorFlow operations, once per process.

A library is built for one minor version of TensorFlow, because TensorFlow's C++
interface changes with every minor version. The library for the running version is
loaded; if there is none, `op_compiler` compiles it on first use. A library that was
built for another version is never loaded.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import auto_control_deps

from tfdist.collectives.tf_ops.call_order import chain_calls, claim_when_called
from tfdist.core import engines, native, op_compiler

_logger = logging.getLogger("tfdist")

# Library for the running TensorFlow; an installation may lack it.
LIBRARY_PATH = native.LIBRARY_FOLDER / op_compiler.library_name(tf.__version__)

# Ranks may trace and start these operations in different orders, because the core
# makes all ranks use the same order. A barrier stays in program order.
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

    The functions come from the library for the running TensorFlow, or from the engine
    selected by `TFDIST_ENGINE`.

    Raises:
        ImportError: the core is not built, or there are no operations for this
            TensorFlow and they cannot be compiled.
    """
    engine = engines.chosen()
    return native_ops() if engine is None else engine.operations()


@functools.cache
def native_ops() -> ModuleType:
    """Returns the generated functions of the library, regardless of the engine.

    Raises:
        ImportError: as for `ops`.
    """
    # Load the core first, by its absolute path, so that the library of operations uses
    # the same core and shares its state.
    native.library()
    path = library_path()
    try:
        module = _load(path)
    except ImportError:
        if path == LIBRARY_PATH:
            raise
        # Compiled on another machine that shares the home folder, or by an older
        # compiler.
        path.unlink(missing_ok=True)
        module = _load(library_path())
    release_from_order(auto_control_deps)
    chain_calls(auto_control_deps)
    claim_when_called(AtomicFunction)
    return module


def library_path() -> Path:
    """Returns the library for the running TensorFlow, compiled now if there is none.

    Raises:
        ImportError: there is no library, and it cannot be compiled.
    """
    if op_compiler.fits(op_compiler.built_for(LIBRARY_PATH), tf.__version__):
        return LIBRARY_PATH
    tensorflow = op_compiler.TensorFlow(
        tf.__version__,
        tf.sysconfig.get_include(),
        tf.sysconfig.get_lib(),
        tuple(tf.sysconfig.get_compile_flags()),
    )
    try:
        return op_compiler.compiled_on_first_use(
            tensorflow, source_folder(), native.LIBRARY_FOLDER, _logger.warning
        )
    except op_compiler.CompileError as error:
        raise ImportError(
            f"{_refusal(tf.__version__)} They are compiled on first use, but {error}."
        ) from None


def source_folder() -> Path:
    """Returns the folder of the operations' source files: in the wheel, or the tree."""
    copy = native.LIBRARY_FOLDER / "tfdist_ops"
    return copy if copy.is_dir() else native.LIBRARY_FOLDER.parents[1] / "tfdist_ops"


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
            "the operations of tfdist that were built for TensorFlow "
            f"{op_compiler.built_for(path)} do not load into TensorFlow "
            f"{tf.__version__}: {reason}. This TensorFlow was compiled differently "
            "from the one they were built for. Build tfdist from its source folder in "
            "the environment where it is used: pip install --no-build-isolation ."
        ) from None


def _refusal(running: str) -> str:
    paths = native.LIBRARY_FOLDER.glob(op_compiler.library_name("*.*"))
    versions = sorted({op_compiler.built_for(path) for path in paths} - {""})
    there = f"those of TensorFlow {', '.join(versions)}" if versions else "none"
    return (
        f"tfdist has no operations for TensorFlow {running}: this installation has "
        f"{there}."
    )
