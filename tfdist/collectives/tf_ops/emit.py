"""Emits the TensorFlow operations of tfdist.

`tfdist.collectives` checks the arguments. In this module all tensors of a call have one
dtype, and scales are strings: float attributes of TensorFlow operations are float32,
and a scale must stay exact.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record as _record

from tfdist import errors
from tfdist.collectives.reduce_op import ReduceOp, check_reducible, reduce_op_number
from tfdist.collectives.tf_ops.eager_call import to_eager_call
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.collectives.tf_ops.op_names import claim, key_of, operation_name
from tfdist.collectives.tf_ops.parallel_map_check import check_not_parallel
from tfdist.collectives.tf_ops.xla_context import check_not_xla
from tfdist.core import engines, native, runtime
from tfdist.core.deadlock import one_rank_code, watcher


def allreduce(
    values: list[tf.Tensor],
    name: str,
    op: ReduceOp,
    prescale: str,
    postscale: str,
    timeout_s: float | None,
    *,
    tensor_indices: Sequence[int] = (),
    group: str = "",
    bucket: int = 0,
    bucket_count: int = 0,
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Reduces tensors of one dtype in one operation."""
    return _emit(
        "tfdist_allreduce",
        tensors=values,
        name=name,
        reduce_op=reduce_op_number(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=timeout_s,
        process_set=process_set,
        # The same call in every run of a function: the ranks need not negotiate again.
        repeats=not group and not tf.executing_eagerly(),
        group=group,
        bucket=bucket,
        bucket_count=bucket_count,
        tensor_indices=list(tensor_indices),
    )


@functools.lru_cache(maxsize=1024, typed=True)
def eager_allreduce(
    dtype: tf.DType, name: str | None, op: ReduceOp, timeout_s: float | None
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that reduces an eager tensor of `dtype` over all ranks.

    The function is cached for calls that repeat in each iteration. Otherwise checking
    the arguments takes almost as long as reducing, because TensorFlow's code has filled
    the CPU caches in the meantime.

    Raises:
        TypeError, ValueError: an argument is not valid, as for `tfdist.allreduce`, or
            not hashable.
    """
    check_reducible(dtype, op, "allreduce")
    op_name = operation_name("allreduce", name)
    arguments = {
        "tensor_name": op_name,
        "reduce_op": reduce_op_number(op),
        "timeout_s": native.timeout_of(timeout_s),
    }
    run = ops().tfdist_allreduce
    keys = [key_of(op_name)]
    cached = to_eager_call(dict(arguments))
    if (name, timeout_s) == (None, None) and engines.chosen() is None:
        # Few different values occur in such calls. Passing them as attributes saves
        # 1 us.
        cached = {**arguments, "call": []}

    def reduce_cached(tensor: tf.Tensor) -> tf.Tensor:
        if _record.could_possibly_record():
            return _emit(
                "tfdist_allreduce",
                tensors=[tensor],
                name=op_name,
                timeout_s=timeout_s,
                reduce_op=arguments["reduce_op"],
            )[0]
        claim(keys)
        watcher.callers.add(threading.get_ident())
        place = one_rank_code.PLACE.get()
        if place is not None:
            one_rank_code.refuse_collective(place, "tfdist_allreduce", arguments)
        with errors.translate():
            return run(tensors=[tensor], **cached)[0]

    return reduce_cached


class Gathered(Protocol):
    """Result of an allgather or gather.

    Attributes:
        rows: rows in rank order.
        splits: number of rows received from each rank. An engine may need a separate
            collective to compute it, so either all ranks read this property or none.
    """

    @property
    def rows(self) -> tf.Tensor:
        """Returns the concatenated rows."""

    @property
    def splits(self) -> tf.Tensor:
        """Returns the splits, int32 or int64 of shape `[size]`."""


def allgather(
    value: tf.Tensor, name: str, timeout_s: float | None, *, process_set: int = 0
) -> Gathered:
    """Concatenates the rows of all ranks."""
    gathered: Gathered = _emit(
        "tfdist_allgather",
        tensor=value,
        name=name,
        timeout_s=timeout_s,
        process_set=process_set,
    )
    return gathered


def broadcast(
    values: list[tf.Tensor],
    root: int,
    name: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Broadcasts the root's tensors, all of one dtype, in one operation."""
    return _emit(
        "tfdist_broadcast",
        tensors=values,
        name=name,
        root=_rank(root, "root"),
        timeout_s=timeout_s,
        process_set=process_set,
    )


def reduce(
    values: list[tf.Tensor],
    root: int,
    name: str,
    op: ReduceOp,
    prescale: str,
    postscale: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Reduces tensors of one dtype to the root in one operation."""
    return _emit(
        "tfdist_reduce",
        tensors=values,
        name=name,
        root=_rank(root, "root"),
        reduce_op=reduce_op_number(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=timeout_s,
        process_set=process_set,
    )


def reduce_scatter(
    value: tf.Tensor,
    splits: tf.Tensor,
    name: str,
    op: ReduceOp,
    prescale: str,
    postscale: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> tf.Tensor:
    """Reduces a tensor; each rank gets its part of the rows."""
    return _emit(
        "tfdist_reduce_scatter",
        tensor=value,
        splits=splits,
        name=name,
        reduce_op=reduce_op_number(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=timeout_s,
        process_set=process_set,
    ).rows


def gather(
    value: tf.Tensor,
    root: int,
    name: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> Gathered:
    """Concatenates the rows of all ranks on the root; other ranks get no rows."""
    gathered: Gathered = _emit(
        "tfdist_gather",
        tensor=value,
        name=name,
        root=_rank(root, "root"),
        timeout_s=timeout_s,
        process_set=process_set,
    )
    return gathered


def scatter(
    value: tf.Tensor,
    root: int,
    splits: tf.Tensor,
    name: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> tf.Tensor:
    """Sends each rank its part of the root's rows."""
    return _emit(
        "tfdist_scatter",
        tensor=value,
        splits=splits,
        name=name,
        root=_rank(root, "root"),
        timeout_s=timeout_s,
        process_set=process_set,
    )


def alltoall(
    value: tf.Tensor,
    splits: tf.Tensor,
    name: str,
    timeout_s: float | None,
    *,
    process_set: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the rows to each rank; returns received rows and their splits."""
    outputs = _emit(
        "tfdist_alltoall",
        tensor=value,
        splits=splits,
        name=name,
        timeout_s=timeout_s,
        process_set=process_set,
    )
    return outputs.rows, outputs.received_splits


def send(value: tf.Tensor, dst: int, name: str, timeout_s: float | None) -> tf.Tensor:
    """Sends a tensor to rank `dst`; returns a scalar 0."""
    return _emit(
        "tfdist_send",
        tensor=value,
        name=name,
        dst=_rank(dst, "dst"),
        timeout_s=timeout_s,
    )


def recv(
    shape: tf.Tensor,
    dtype: tf.DType,
    src: int,
    name: str,
    timeout_s: float | None,
    *,
    after: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Receives a tensor from rank `src`."""
    return _emit(
        "tfdist_recv",
        shape=shape,
        after=list(after),
        T=dtype,
        name=name,
        src=_rank(src, "src"),
        timeout_s=timeout_s,
    )


def barrier(name: str, timeout_s: float | None, *, process_set: int = 0) -> None:
    """Waits for all ranks."""
    _emit(
        "tfdist_barrier",
        name=name,
        timeout_s=timeout_s,
        process_set=process_set,
    )


def _emit(
    operation: str, *, name: str, timeout_s: float | None, **arguments: Any
) -> Any:
    """Runs an operation, or adds it to the graph; converts errors to tfdist's.

    Args:
        operation: name of the generated function, such as "tfdist_allreduce".
        name: operation name; calls with the same name on different ranks are matched.
        timeout_s: seconds to wait for the slowest rank; None: TFDIST_TIMEOUT_S.
        arguments: inputs and other attributes of the operation.
    """
    arguments["tensor_name"] = name
    arguments["timeout_s"] = native.timeout_of(timeout_s)
    is_eager = tf.executing_eagerly()
    if is_eager:
        get = arguments.get
        key = key_of(
            name,
            process_set=get("process_set", 0),
            src=get("src"),
            dst=get("dst"),
        )
        claim([key])
        if "root" in arguments and runtime.is_rehearsing():
            arguments["root"] = 0  # this process is the only rank of its engine
    else:
        check_not_xla()
        check_not_parallel()
    watcher.callers.add(threading.get_ident())
    place = one_rank_code.PLACE.get()
    if place is not None:
        one_rank_code.refuse_collective(place, operation, arguments)
    if is_eager:
        arguments = to_eager_call(arguments)
    elif engines.chosen() is None:
        arguments["call"] = []
    with errors.translate():
        return getattr(ops(), operation)(**arguments)


def _rank(rank: Any, argument: str) -> int:
    # Whether the rank exists is checked by the core, on all ranks: a function may be
    # traced before init(), and an error on this rank alone would leave the other ranks
    # waiting.
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
        raise ValueError(
            f"Expected {argument} to be a rank, an integer >= 0, got {rank!r}."
        )
    return int(rank)
