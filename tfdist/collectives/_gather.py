"""allgather and gather: concatenation of the rows of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def allgather(
    tensor: Any,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in rank order, on every rank.

    Args:
        tensor: tensor of any numeric dtype (including float8) or bool, of shape `[n,
            ...]`. `n` may differ between ranks and may be 0; the other dimensions must
            be equal on all ranks. A scalar is treated as one row.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor of shape `[sum of n, ...]`. Differentiable: each rank gets, for its own
        rows, the sum of the gradients of all ranks.

    Raises:
        TypeError: `tensor` does not hold numbers. Use `tfdist.allgather_object` for
            strings.
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: dtypes or row shapes differ between the ranks.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

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


@tf.autograph.experimental.do_not_convert
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
        tensor: as in `allgather`: of shape `[n, ...]`. `n` may differ between ranks and
            may be 0; the other dimensions must be equal on all ranks. A scalar is
            treated as one row.
        root: rank that gets the rows; must be equal on all ranks. Default: 0.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        On `root` a tensor of shape `[sum of n, ...]`, on other ranks a tensor of shape
        `[0, ...]`. Differentiable: the gradient is a `scatter`; each rank gets the part
        of the root's gradient that belongs to its own rows.

    Raises:
        TypeError: `tensor` does not hold numbers. Use `tfdist.allgather_object` for
            strings.
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: dtypes, row shapes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.gather(tf.constant([[1, 2]])).numpy().tolist()
        [[1, 2]]

        On two ranks, `[1, 2]` on rank 0 and `[3]` on rank 1 give `[1, 2, 3]` on rank 0
        and `[]` on rank 1.
    """
    value = _arguments.tensor_of(tensor, "gather")
    return emit.gather(
        value,
        root,
        operation_name("gather", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    ).rows
