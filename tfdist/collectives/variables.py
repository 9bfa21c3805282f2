"""broadcast_variables: copies the values of one rank to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import signature
from tfdist.collectives.per_rank_variables import note_broadcast
from tfdist.core.process_sets import ProcessSet, check_root

# Functions that every rank calls with the variables that it has broadcast or received.
after_broadcast: list[Callable[[Sequence[Any]], None]] = []


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root: int = 0,
    *,
    process_set: ProcessSet | None = None,
) -> None:
    """Sets `variables` on every rank to their values on rank `root`.

    The ranks first compare their lists, so that a difference in paths, shapes or dtypes
    raises an error before anything is changed. Then a few operations send all values.

    A `keras.layers.Normalization` layer caches values derived from its variables. Call
    its `finalize_state()` afterwards. (`BroadcastInitialState` does this.)

    Args:
        variables: Keras variables, `tf.Variable`s, or both, in the same order on every
            rank; e.g. `model.weights + model.optimizer.variables`.
        root: rank whose values all other ranks get; default 0.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Raises:
        TypeError: an entry is not a variable, or its dtype cannot be sent.
        ValueError: `root` is not a rank, or not in `process_set`.
        tfdist.MismatchError: the lists of variables, or the roots, differ between the
            ranks.
        tfdist.RankFailedError: a rank failed; the message names it.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> w = tf.Variable([1.0, 2.0])
        >>> tfdist.broadcast_variables([w], root=0)
    """
    check_root(root, process_set)
    items = list(variables)
    for variable in items:
        _check_variable(variable)
    lines = [signature.describe_variable(v) for v in items]
    signature.agree(
        lines,
        f"op=broadcast root={root}",
        process_set=process_set,
    )
    values = [tf.convert_to_tensor(v) for v in items]
    received = collectives.grouped_broadcast(
        values, root, name="broadcast_variables", process_set=process_set
    )
    for variable, value in zip(items, received, strict=True):
        variable.assign(value)
    note_broadcast(items)
    for notify in after_broadcast:
        notify(items)


def _check_variable(variable: Any) -> None:
    if not hasattr(variable, "assign") or not hasattr(variable, "dtype"):
        raise TypeError(
            "Expected Keras variables or tf.Variables, got "
            f"{type(variable).__name__}: {variable!r}."
        )
    dtype = tf.as_dtype(variable.dtype)
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex):
        raise TypeError(
            f"Variable {signature.path_of(variable)} has dtype {dtype.name}, which "
            "cannot be sent. Remove it from the list."
        )
