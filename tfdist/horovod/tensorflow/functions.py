"""Broadcasts and gathers variables and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tfdist.collectives.per_rank_variables import is_accumulator
from tfdist.horovod.common.process_sets import (
    check_initialized,
    global_process_set,
    own,
)
from tfdist.horovod.tensorflow.mpi_ops import broadcast_

# Maximum size of an encoded object (2 GiB in Horovod). Send larger data as tensors.
MAX_BYTES = 256 << 20


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = False,
) -> Any:
    """Sets variables to their values on rank `root_rank`.

    In eager mode the ranks first compare their variables. If paths, shapes or dtypes
    differ, an error is raised before any variable is changed; with `inplace`, earlier
    variables of the list may have been changed.

    With `backward_passes_per_step`, the variables of an optimizer include the gradients
    that each rank has added up since the last update. They are not broadcast, because
    Horovod does not keep them in the optimizer's variables.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every rank.
        root_rank: rank (of the job) whose values are sent.
        process_set: the ranks that take part; only these ranks call the function.
        inplace: whether to broadcast the variables one by one instead of together, so
            that extra memory is needed only for the largest variable.

    Returns:
        In a `tf.Graph`, the operation to run; otherwise None.

    Raises:
        tf.errors.FailedPreconditionError: the ranks' variables or roots differ; raised
            on every rank.
        TypeError: an entry is not a variable.
        ValueError: `root_rank` is not a rank of the process set.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables([tf.Variable([1.0, 2.0])], root_rank=0)
    """
    listed = [v for v in variables if not is_accumulator(v)]
    if _in_plain_graph():
        parts = [[v] for v in listed] if inplace else [listed]
        ends = [broadcast_(p, root_rank, process_set=process_set) for p in parts if p]
        return tf.group(*[tensor for end in ends for tensor in end])
    if not inplace:
        tfdist.broadcast_variables(listed, root_rank, process_set=own(process_set))
        return None
    for variable in listed:
        tfdist.broadcast_variables([variable], root_rank, process_set=own(process_set))
    return None


def _in_plain_graph() -> bool:
    """Returns whether operations are added to a `tf.Graph` outside any tf.function."""
    return not tf.executing_eagerly() and not tf.inside_function()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Broadcasts an object from rank `root_rank` to every rank.

    Plain data of at most 256 MiB can be sent: None, bool, int, float, str, bytes, NumPy
    arrays and scalars, and lists, tuples and dicts of these. Other objects are pickled,
    but only if the ranks were started with `TFDIST_OBJECTS=pickle`.

    Args:
        obj: plain data, or an object that can be pickled; used only on the root.
        root_rank: rank (of the job) whose object is sent.
        session: ignored: the call runs eagerly, even in a `tf.Graph`.
        name: operation name; calls with the same name on different ranks are matched.
            Default: calls are matched by their order.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        The object; on the root, a copy.

    Raises:
        TypeError: on the root: the object is not plain data and `TFDIST_OBJECTS` is not
            set, or the object cannot be pickled.
        ValueError: on the root: the object is too large. On any rank: `root_rank` is
            not a rank of the process set, `hvd.init()` was not called, or a pickled
            object cannot be loaded.
        tf.errors.AbortedError: the root could not send its object, or a different rank
            could not load it.
        RuntimeError: called in a `tf.function`.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3, "rates": (0.1, 0.01)})
        {'epoch': 3, 'rates': (0.1, 0.01)}
    """
    _check_place("broadcast_object", session)
    with context.eager_mode():
        return tfdist.broadcast_object(
            obj,
            root_rank,
            name=name,
            max_bytes=MAX_BYTES,
            process_set=own(process_set),
        )


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that calls `broadcast_object` with these arguments.

    Args:
        root_rank: rank (of the job) whose object is sent.
        session: ignored, as in `broadcast_object`.
        name: operation name, as in `broadcast_object`.
        process_set: the ranks that take part.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object_fn(root_rank=0)([1, 2])
        [1, 2]
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Gathers the objects of all ranks on every rank.

    Args:
        obj: plain data, or an object that can be pickled, as in `broadcast_object`.
        session: ignored, as in `broadcast_object`.
        name: operation name, as in `broadcast_object`.
        process_set: the ranks that take part; only these ranks call the function.

    Returns:
        The objects in rank order; None for a rank that has called `hvd.join()`.

    Raises:
        TypeError: this rank's object is not plain data and `TFDIST_OBJECTS` is not set,
            or the object cannot be pickled.
        ValueError: the object is too large, `hvd.init()` was not called, or a pickled
            object cannot be loaded.
        tf.errors.AbortedError: a rank could not send its object, or could not load an
            object.
        RuntimeError: called in a `tf.function`.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}]
    """
    _check_place("allgather_object", session)
    with context.eager_mode():
        return tfdist.allgather_object(
            obj, name=name, max_bytes=MAX_BYTES, process_set=own(process_set)
        )


def _check_place(function: str, session: Any) -> None:
    check_initialized()
    if session is not None and not hasattr(session, "run"):
        raise TypeError(
            f"Expected session to be a tf.compat.v1.Session or None, got {session!r}."
        )
    if tf.inside_function():
        raise RuntimeError(
            f"hvd.{function} cannot be called in a tf.function: objects are not "
            "tensors. Call it outside, or use hvd.broadcast or hvd.allgather."
        )
