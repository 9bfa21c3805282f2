"""Variables and Python objects of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tfdist.horovod.common.process_sets import (
    check_initialized,
    global_process_set,
    own,
)
from tfdist.horovod.tensorflow.mpi_ops import broadcast_

# Of one encoded object. Horovod's own limit is 2 GiB; an object that large is an array.
MAX_BYTES = 256 << 20


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives variables the values that they have on rank `root_rank`.

    Eagerly the ranks first agree on the list, so that a difference in paths, shapes or
    dtypes is an error before anything is changed.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every rank.
        root_rank: the rank of the job whose values are taken.
        process_set: the ranks that take part, which alone call it.
        inplace: whether the variables are received one by one, not all together:
            no more memory is needed than for the largest.

    Returns:
        In a `tf.Graph` the operation to run; None otherwise.

    Raises:
        tf.errors.FailedPreconditionError: the ranks' variables or roots differ, on
            every rank.
        TypeError: something is not a variable.
        ValueError: `root_rank` is not a rank of the process set.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables([tf.Variable([1.0, 2.0])], root_rank=0)
    """
    listed = list(variables)
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
    """In a graph that a session runs, and not in a function."""
    return not tf.executing_eagerly() and not tf.inside_function()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Gives every rank the object of rank `root_rank`.

    Plain data goes (None, bool, int, float, str, bytes, NumPy arrays and scalars, and
    lists, tuples and dicts of these), at most 256 MiB. Other objects are pickled, but
    only where the ranks were started with `TFDIST_OBJECTS=pickle`.

    Args:
        obj: plain data, or what can be pickled; looked at on the root only.
        root_rank: the rank of the job whose object all get.
        session: not needed: also in a `tf.Graph` the object goes beside the graph.
        name: pairs the calls of the ranks; default: by their order.
        process_set: the ranks that take part, which alone call it.

    Returns:
        The object; on the root a copy.

    Raises:
        TypeError: on the root: the object is not plain data, and the variable is not
            set; or it cannot be pickled.
        ValueError: on the root: it is too large; anywhere: `root_rank` is not a rank
            of the process set, or `hvd.init()` was not called; a pickled object cannot
            be loaded here.
        tf.errors.AbortedError: the root could not send its object, or another rank
            could not load it.
        RuntimeError: in a `tf.function`.

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
    """A function of an object that does as `broadcast_object`, with these arguments.

    Args:
        root_rank: the rank of the job whose object all get.
        session: not needed, as there.
        name: pairs the calls of the ranks.
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
    """Gives every rank the objects of all ranks.

    Args:
        obj: plain data, or what can be pickled, as in `broadcast_object`.
        session: not needed, as there.
        name: pairs the calls of the ranks; default: by their order.
        process_set: the ranks that take part, which alone call it.

    Returns:
        The objects in rank order; None for a rank that has joined.

    Raises:
        TypeError: this rank's object is not plain data, and the variable is not set;
            or it cannot be pickled.
        ValueError: it is too large, or `hvd.init()` was not called; a pickled object
            cannot be loaded here.
        tf.errors.AbortedError: a rank could not send its object, or load another one.
        RuntimeError: in a `tf.function`.

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
            f"hvd.{function} cannot be called in a tf.function: objects are no "
            "tensors. Call it outside, or use hvd.broadcast or hvd.allgather."
        )
