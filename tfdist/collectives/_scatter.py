"""scatter: every rank gets its part of the rows of one rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def scatter(
    tensor: Any,
    root: int = 0,
    splits: Any = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Cuts the rows of rank `root` into parts and gives each rank its part.

    Args:
        tensor: on `root` a tensor of any numeric dtype (float8 too) or bool and of
            shape `[rows, ...]`; a scalar is one row. On other ranks a tensor of the
            same dtype and shape of a row, of which nothing else counts: `[0, ...]`
            will do.
        root: the rank whose rows are given away, the same on every rank; default 0.
        splits: on `root` how many consecutive rows each rank gets: as many integers
            >= 0 as there are ranks, which sum to `rows`. Default: as even as
            possible, the first `rows % size` ranks get one more. Not looked at on
            other ranks.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `[splits[rank], ...]`. Differentiable: the gradient is a
        `gather`; the root gets the gradients of all parts, the others zeros.

    Raises:
        tfdist.MismatchError: dtypes, the shapes of a row or roots differ between the
            ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`, or its `splits` do
            not fit to its tensor.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.scatter(tf.constant([1, 2, 3])).numpy().tolist()
        [1, 2, 3]

        On two ranks, with `[1, 2, 3]` on rank 0, rank 0 gets `[1, 2]` and rank 1
        gets `[3]`; with `splits=[0, 3]`, rank 1 gets everything.
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
