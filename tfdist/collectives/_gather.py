"""allgather and gather: the rows of all ranks, one after the other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def allgather(
    tensor: Any,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in rank order, on every rank.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and of shape
            `[n, ...]`; `n` may differ between ranks and may be 0, the rest may not. A
            scalar is one row.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `[sum of n, ...]`. Differentiable: each rank gets the sum of
        all ranks' gradients of its own rows.

    Raises:
        TypeError: it holds no numbers (texts: `tfdist.allgather_object`).
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: dtypes or the shapes of a row differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.allgather(tf.constant([[1, 2]])).numpy().tolist()
        [[1, 2]]
    """
    value = _arguments.tensor_of(tensor, "allgather")
    return emit.allgather(
        value,
        operation_name("allgather", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    ).rows


def gather(
    tensor: Any,
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in rank order, on rank `root`.

    Args:
        tensor: as in `allgather`: of shape `[n, ...]`, where `n` may differ between
            ranks and may be 0, and the rest may not. A scalar is one row.
        root: the rank that gets the rows, the same on every rank; default 0.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        On `root` a tensor of shape `[sum of n, ...]`, elsewhere one of shape
        `[0, ...]`. Differentiable: the gradient is a `scatter`; each rank gets the
        part of the root's gradient that belongs to its own rows.

    Raises:
        TypeError: it holds no numbers (texts: `tfdist.allgather_object`).
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: dtypes, the shapes of a row or roots differ between the
            ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.gather(tf.constant([[1, 2]])).numpy().tolist()
        [[1, 2]]

        On two ranks, `[1, 2]` on one and `[3]` on the other give `[1, 2, 3]` on rank
        0 and `[]` on rank 1.
    """
    value = _arguments.tensor_of(tensor, "gather")
    return emit.gather(
        value,
        root,
        operation_name("gather", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    ).rows
