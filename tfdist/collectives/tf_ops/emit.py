"""Emits the operations of `libtfdist_tf.so`.

Arguments are checked in `tfdist.collectives`; here are tensors of one dtype, a name,
and scales as text (attributes of TensorFlow are float32, a scale must stay exact).
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record as _record
from tensorflow.python.eager.forwardprop_util import pack_tangents as _pack_tangents
from tensorflow.python.ops import control_flow_util

from tfdist import errors
from tfdist.collectives.tf_ops.map_guard import check_not_parallel
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.collectives.tf_ops.op_names import claim, key_of, operation_name
from tfdist.core import engines, native
from tfdist.core.waits import _one_rank, _watch


class InsideXlaError(NotImplementedError):
    """Something of tfdist was called in a function that XLA compiles.

    Args:
        why: what cannot run there; default: an operation of tfdist.
    """

    ag_pass_through = True  # or AutoGraph would put a class of its own in its place

    def __init__(self, why: str | None = None) -> None:
        self.why = why
        super().__init__(
            "tfdist operations cannot run inside a function compiled by XLA"
            f"{f': {why}' if why else ''}. Give model.fit a callback of tfdist, which "
            "lets XLA compile forward and backward alone: "
            "callbacks=[tfdist.callbacks.BroadcastInitialState()]; or write "
            "jit_compile=False in model.compile(...) or tf.function(...). (On a "
            "machine with a GPU, Keras compiles by default.)"
        )


class ReduceOp(enum.IntEnum):
    """How the values of the ranks are combined.

    ===================================  ==========================================
    dtype                                operations
    ===================================  ==========================================
    int8 to int64, uint8 to uint64       all
    bool                                 MIN, MAX, LOGICAL_*
    float16, bfloat16, float32, float64  SUM, AVERAGE, MIN, MAX, PRODUCT
    complex64, complex128                SUM, AVERAGE, PRODUCT
    float8_e5m2, float8_e4m3fn           none: cast to bfloat16
    ===================================  ==========================================

    - float16 and bfloat16 are accumulated in float32 and rounded once.
    - Integers wrap, as NumPy's do. AVERAGE is the sum, divided by the number of ranks:
      of integers the wrapped sum, cut towards zero (cast small types before averaging
      them: the uint8 average of 200 and 200 is 72).
    - MIN and MAX propagate NaN; of zeros of different sign either may come out, the
      same on all ranks. Of bools they are `and` and `or`, as in NumPy. A SUM of bools
      is refused, because it could be a count (cast to int32) or an `or` (LOGICAL_OR).
    - LOGICAL_* take every number but 0 for true, as NumPy's `logical_and` does; the
      result keeps the dtype and is 0 or 1. LOGICAL_XOR is true where an odd number of
      ranks is. They do not combine bits.
    """

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    LOGICAL_AND = 5
    LOGICAL_OR = 6
    LOGICAL_XOR = 7


_OPS = frozenset(ReduceOp)


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
        tensor_name=name,
        reduce_op=_reduce_op(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=native.timeout_of(timeout_s),
        process_set=process_set,
        # The place in a function, with whatever name: ranks need not agree again.
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

    Cached for calls that repeat in each iteration: checking the arguments again takes
    almost as long as reducing, since TensorFlow's code has filled the caches meanwhile.

    Raises:
        TypeError, ValueError: an argument is not valid; `allreduce` of `tfdist` says
            which. Here one that can't be hashed is not valid either.
    """
    check_reducible(dtype, op, "allreduce")
    named = operation_name("allreduce", name)
    arguments = {
        "tensor_name": named,
        "reduce_op": _reduce_op(op),
        "timeout_s": native.timeout_of(timeout_s),
    }
    run = ops().tfdist_allreduce
    keys = [key_of(named)]
    again = _as_eager_call(dict(arguments))
    if (name, timeout_s) == (None, None) and engines.chosen() is None:
        again = {
            **arguments,
            "call": [],
        }  # of such calls there are few kinds: 1 us less

    def reduce_again(tensor: tf.Tensor) -> tf.Tensor:
        if _record.could_possibly_record():
            return _emit(
                "tfdist_allreduce",
                tensors=[tensor],
                **arguments,
            )[0]
        claim(keys)
        _watch.callers.add(threading.get_ident())
        place = _one_rank.PLACE.get()
        if place is not None:
            _one_rank.refuse_collective(place, "tfdist_allreduce", arguments)
        with errors.translate():
            return run(tensors=[tensor], **again)[0]

    return reduce_again


class Gathered(Protocol):
    """Result of an allgather or a gather.

    Attributes:
        rows: in the order of the ranks.
        splits: how many of them came from each rank. An engine may need an exchange of
            its own for it, so all ranks ask for it or none.
    """

    @property
    def rows(self) -> tf.Tensor:
        """The concatenation."""

    @property
    def splits(self) -> tf.Tensor:
        """int32 or int64, shape `[size]`."""


def allgather(
    value: tf.Tensor, name: str, timeout_s: float | None, *, process_set: int = 0
) -> Gathered:
    """Concatenates the rows of all ranks."""
    gathered: Gathered = _emit(
        "tfdist_allgather",
        tensor=value,
        tensor_name=name,
        timeout_s=native.timeout_of(timeout_s),
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
    """Gives tensors of one dtype the root's values in one operation."""
    return _emit(
        "tfdist_broadcast",
        tensors=values,
        tensor_name=name,
        root=_rank(root, "root"),
        timeout_s=native.timeout_of(timeout_s),
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
        tensor_name=name,
        root=_rank(root, "root"),
        reduce_op=_reduce_op(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=native.timeout_of(timeout_s),
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
        tensor_name=name,
        reduce_op=_reduce_op(op),
        prescale=prescale,
        postscale=postscale,
        timeout_s=native.timeout_of(timeout_s),
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
    """Concatenates the rows of all ranks on the root; no rows elsewhere."""
    gathered: Gathered = _emit(
        "tfdist_gather",
        tensor=value,
        tensor_name=name,
        root=_rank(root, "root"),
        timeout_s=native.timeout_of(timeout_s),
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
    """Gives each rank its part of the root's rows."""
    return _emit(
        "tfdist_scatter",
        tensor=value,
        splits=splits,
        tensor_name=name,
        root=_rank(root, "root"),
        timeout_s=native.timeout_of(timeout_s),
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
    """Sends a part of the rows to each rank: the received rows, and their splits."""
    outputs = _emit(
        "tfdist_alltoall",
        tensor=value,
        splits=splits,
        tensor_name=name,
        timeout_s=native.timeout_of(timeout_s),
        process_set=process_set,
    )
    return outputs.rows, outputs.received_splits


def send(value: tf.Tensor, dst: int, name: str, timeout_s: float | None) -> tf.Tensor:
    """Hands a tensor to rank `dst`; a scalar 0."""
    return _emit(
        "tfdist_send",
        tensor=value,
        tensor_name=name,
        dst=_rank(dst, "dst"),
        timeout_s=native.timeout_of(timeout_s),
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
    """Gets a tensor from rank `src`."""
    return _emit(
        "tfdist_recv",
        shape=shape,
        after=list(after),
        T=dtype,
        tensor_name=name,
        src=_rank(src, "src"),
        timeout_s=native.timeout_of(timeout_s),
    )


def barrier(name: str, timeout_s: float | None, *, process_set: int = 0) -> None:
    """Waits for all ranks."""
    _emit(
        "tfdist_barrier",
        tensor_name=name,
        timeout_s=native.timeout_of(timeout_s),
        process_set=process_set,
    )


def inside_xla() -> bool:
    """Whether the function being traced is compiled by XLA."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def check_not_xla(why: str | None = None) -> None:
    """Raises if the function being traced is compiled by XLA.

    Args:
        why: what cannot run there; default: an operation of tfdist.

    Raises:
        InsideXlaError: names what to change.
    """
    if inside_xla():
        raise InsideXlaError(why)


def _emit(operation: str, **arguments: Any) -> Any:
    """Runs an operation, or adds it to the graph, with our errors for its own."""
    is_eager = tf.executing_eagerly()
    if is_eager:
        get = arguments.get
        key = key_of(
            arguments["tensor_name"],
            process_set=get("process_set", 0),
            src=get("src"),
            dst=get("dst"),
        )
        claim([key])
    else:
        check_not_xla()
        check_not_parallel()
    _watch.callers.add(threading.get_ident())
    place = _one_rank.PLACE.get()
    if place is not None:
        _one_rank.refuse_collective(place, operation, arguments)
    if is_eager:
        arguments = _as_eager_call(arguments)
    elif engines.chosen() is None:
        arguments["call"] = []
    with errors.translate():
        return getattr(ops(), operation)(**arguments)


def _as_eager_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which an operation is called eagerly; changes `arguments`.

    TensorFlow keeps a kernel for every value of an attribute, and never frees it. So
    values that may differ in every call are passed as a tensor instead, `call`; its
    form is in `tfdist_ops/tf/call_text.h`.
    """
    if engines.chosen() is not None:
        return arguments
    if _record.could_possibly_record() and _has_tangent(arguments):
        # TensorFlow traces the derivative (ForwardAccumulator), and a trace does not
        # know the value of a tensor.
        arguments["call"] = []
        return arguments
    take = arguments.pop
    text = (
        f"{take('process_set', 0)} {take('timeout_s')} {take('prescale', 1.0)} "
        f"{take('postscale', 1.0)} {take('group', '') or '-'} "
        f"{tf.compat.as_str(take('tensor_name'))}"
    )
    # Without a timeout, the generated function takes the integer 0, and a slower way.
    arguments.update(tensor_name="", timeout_s=0.0, call=[_string_tensor(text)])
    return arguments


def _has_tangent(arguments: dict[str, Any]) -> bool:
    tensors = [*arguments.get("tensors", ()), *arguments.get("after", ())]
    if "tensor" in arguments:
        tensors.append(arguments["tensor"])
    return any(_pack_tangents(tensors).indices)


def in_call(call: tf.Tensor) -> dict[str, Any]:
    """The values that an eager call has passed as a tensor, by attribute."""
    number, timeout_s, prescale, postscale, group, name = (
        call.numpy().decode().split(" ", maxsplit=5)
    )
    return {
        "tensor_name": name,
        "process_set": int(number),
        "timeout_s": float(timeout_s),
        "prescale": prescale,
        "postscale": postscale,
        "group": "" if group == "-" else group,
    }


@functools.lru_cache(maxsize=1024)
def _string_tensor(text: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(text)


def _rank(rank: Any, what: str) -> int:
    # Whether there is such a rank the core says, to all ranks alike: a function may be
    # traced before init(), and the others wait for this one.
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
        raise ValueError(
            f"Expected {what} to be a rank, an integer >= 0, got {rank!r}."
        )
    return int(rank)


def check_reducible(dtype: tf.DType, op: Any, function: str) -> None:
    """Raises if the core does not reduce tensors of `dtype` by `op`.

    Raises:
        ValueError: `op` is not a `ReduceOp`.
        TypeError: the type does not take the operation; says which does, or what to
            cast to.
    """
    number = dtype.as_datatype_enum
    refusal = native.reduction_refusal(number, _reduce_op(op))
    engine = engines.chosen()
    if refusal is None and engine is not None:
        refusal = engine.refusal(number, _reduce_op(op))
    if refusal is not None:
        raise TypeError(f"tfdist.{function}: {refusal}")


def _reduce_op(op: Any) -> int:
    # By value only: a text or a bool that happens to fit is a mistake.
    if isinstance(op, bool) or not isinstance(op, int | np.integer) or op not in _OPS:
        expected = ", ".join(f"tfdist.ReduceOp.{known.name}" for known in ReduceOp)
        raise ValueError(f"Expected op to be one of {expected}, got {op!r}.")
    return int(op)
