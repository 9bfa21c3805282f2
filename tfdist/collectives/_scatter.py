"""scatter: every rank gets a part of the rows of one rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def scatter(
    tensor: Any,
    root: int = 0,
    splits: Any = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Splits the rows of rank `root` into parts and sends one part to each rank.

    Args:
        tensor: on `root`, a tensor of any numeric dtype (including float8) or bool, of
            shape `[rows, ...]`; a scalar is treated as one row. On other ranks, a
            tensor with the same dtype and row shape. Its values and number of rows are
            ignored, so it may have the shape `[0, ...]`.
        root: rank whose rows are scattered; must be equal on all ranks. Default: 0.
        splits: on `root`, the numbers of consecutive rows that each rank gets: a list
            of integers >= 0, one for each rank, that sum to `rows`. Default: as even as
            possible; each of the first `rows % size` ranks gets one more row. Ignored
            on other ranks.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor of shape `[splits[rank], ...]`. Differentiable: the gradient is a
        `gather`. The root gets the gradients of all parts, the other ranks get zeros.

    Raises:
        tfdist.MismatchError: dtypes, row shapes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`, or its `splits` do not
            match its tensor.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.scatter(tf.constant([1, 2, 3])).numpy().tolist()
        [1, 2, 3]

        On two ranks, with `[1, 2, 3]` on rank 0, rank 0 gets `[1, 2]` and rank 1 gets
        `[3]`. With `splits=[0, 3]`, rank 1 gets all rows.
    """
    value = _arguments.tensor_of(tensor, "scatter")
    return emit.scatter(
        value,
        root,
        _arguments.splits_of(splits, "scatter"),
        operation_name("scatter", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    )
