"""Reduction of gradients inside a function that XLA compiles.

This needs `libtfdist_xla.so`, which is built by `make xla` and not part of the package.
A group (a gradient list) is reduced by a single custom call, even if it has several
buckets, because XLA runs custom calls one after another, in an order that may differ
between ranks. Several groups in one function are chained, which fixes their order: each
call takes a token from the previous call.

If the library is missing or does not support a reduction, tracing the function raises
`InsideXlaError`. `training.jit_compile` then lets XLA compile the step only up to its
gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
)

from tfdist import errors
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.collectives.tf_ops.xla_context import InsideXlaError, inside_xla
from tfdist.core import engines, native, op_compiler

LIBRARY_PATH = native.LIBRARY_FOLDER / "libtfdist_xla.so"
# Values of an optimizer's `xla` option: use the library if it is available, or never.
CHOICES = ("auto", "off")
_TOKENS = "tfdist/xla_tokens"  # graph collection: token of the graph's last group


def check_choice(xla: str) -> None:
    """Raises ValueError unless `xla` is one of `CHOICES`."""
    if xla not in CHOICES:
        raise ValueError(f"Expected xla='auto' or 'off', got {xla!r}.")


def reduced_by_xla(refusals: Sequence[str | None] = ()) -> bool:
    """Returns whether a custom call reduces the group that is traced now.

    Args:
        refusals: further reasons why a custom call cannot reduce the group; None
            entries are ignored.

    Returns:
        True in a function that XLA compiles, False elsewhere.

    Raises:
        InsideXlaError: XLA compiles the function, but cannot reduce the group in it.
    """
    if not inside_xla():
        return False
    for why in (unusable(), _nested(), *refusals):
        if why is not None:
            raise InsideXlaError(why)
    return True


def unusable() -> str | None:
    """Returns why this process cannot reduce inside XLA, or None if it can."""
    engine = engines.chosen()
    if engine is not None:
        return f"the engine {engine.name!r} has no operations for XLA"
    if not LIBRARY_PATH.is_file():
        return NOT_BUILT
    devices = {d.device_type for d in tf.config.list_logical_devices()} - {"CPU"}
    if devices:
        return (
            f"libtfdist_xla.so reduces on CPUs only, and TensorFlow sees "
            f"{', '.join(sorted(devices))} here"
        )
    return _load()[1]


NOT_BUILT = "libtfdist_xla.so is not built (make xla)"


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Returns the library's operations, or the reason why it cannot be used."""
    built = op_compiler.built_for(LIBRARY_PATH)
    if built != tf.__version__:
        return None, (
            f"libtfdist_xla.so was built for TensorFlow {built}, this is "
            f"{tf.__version__} (make xla)"
        )
    try:
        native.library()  # loaded first, so that all libraries share one core
        ops()
        module = tf.load_op_library(str(LIBRARY_PATH))
        register = ctypes.CDLL(str(LIBRARY_PATH)).tfdist_xla_register
    except (tf.errors.OpError, OSError, AttributeError) as error:
        reason = getattr(error, "message", None) or str(error)
        return None, f"libtfdist_xla.so does not load: {reason} (make xla)"
    register.restype = ctypes.c_char_p
    refusal = register()
    if refusal is not None:
        return None, f"libtfdist_xla.so: {refusal.decode()} (make xla)"
    return module, None


def _nested() -> str | None:
    """Returns the reason to refuse a nested function, or None if there is none.

    Custom calls in a branch, loop or called function cannot be chained.
    """
    graph = tf.compat.v1.get_default_graph()
    in_branch = isinstance(graph, CondBranchFuncGraph | WhileBodyFuncGraph)
    # TensorFlow marks either the compiled graph or the graph that calls it.
    outer = getattr(graph, "outer_graph", None)
    own = [g for g in (graph, outer) if g is not None]
    if not in_branch and any(map(control_flow_util.InXlaContext, own)):
        return None
    return (
        "gradients are reduced inside a tf.cond, tf.while_loop or tf.function of the "
        "compiled step"
    )


def emit_group(
    tensors: Sequence[tf.Tensor],
    *,
    sizes: Sequence[int],
    tensor_indices: Sequence[int],
    group_id: str,
    name: str,
    op: int,
    process_set: int,
) -> list[tf.Tensor]:
    """Emits the single operation that reduces a group inside XLA.

    Call it only if `reduced_by_xla()` has returned True.

    Args:
        tensors: the gradients, bucket by bucket.
        sizes: number of gradients in each bucket. All gradients in a bucket have the
            same dtype.
        tensor_indices: for each tensor, its index in the gradient list.
        group_id: id from `agree_on_gradients`.
        name: name of the group, the same on all ranks. The name of a bucket is this
            name, a dot and the number of the bucket.
        op: a `ReduceOp`.
        process_set: id of the ranks that take part.

    Returns:
        The reduced tensors, in the order of `tensors`.
    """
    module, refusal = _load()
    if module is None:
        raise InsideXlaError(refusal)
    tokens = tf.compat.v1.get_default_graph().get_collection_ref(_TOKENS)
    with errors.translate():
        token, reduced = module.tfdist_reduce_group(
            after=tokens[-1] if tokens else tf.constant(0.0),
            tensors=list(tensors),
            tensor_name=name,
            group=group_id,
            sizes=list(sizes),
            tensor_indices=list(tensor_indices),
            reduce_op=int(op),
            prescale="1.0",
            postscale="1.0",
            process_set=process_set,
        )
    tokens.append(token)
    return list(reduced)


@tf.RegisterGradient("TfdistReduceGroup")
def _no_gradient(_node: Any, *_grads: Any) -> None:
    raise InsideXlaError("a reduced gradient is differentiated again")
