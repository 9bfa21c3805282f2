"""alltoall: every rank sends a part of its rows to every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the own rows to each rank, and gets a part from each.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and of shape
            `[rows, ...]`; `rows` may differ between ranks and may be 0, the rest may
            not. A scalar is one row.
        splits: how many consecutive rows go to each rank: as many integers >= 0 as
            there are ranks, which sum to `rows`; may differ between ranks. Default:
            equal parts; `rows` must then be a multiple of the number of ranks.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Two tensors: the rows that came from rank 0, from rank 1 and so on, of shape
        `[sum of received splits, ...]`; and the received splits: how many rows came
        from each rank, int64 of shape `[size]`. Differentiable: the gradient goes back
        the same way, as an `alltoall` with the received splits.

    Raises:
        tfdist.MismatchError: dtypes or the shapes of a row differ between the ranks.
        tf.errors.InvalidArgumentError: the `splits` of a rank do not fit to its
            tensor, or without them its rows can't be cut into equal parts.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> rows, received = tfdist.alltoall(tf.constant([1, 2, 3]))
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([1, 2, 3], [3])

        On two ranks, with `[1, 2, 3]` and `splits=[1, 2]` on rank 0, and with `[4]`
        and `splits=[1, 0]` on rank 1, rank 0 gets `[1, 4]` and `[1, 1]`, and rank 1
        gets `[2, 3]` and `[2, 0]`.
    """
    value = _arguments.tensor_of(tensor, "alltoall")
    return emit.alltoall(
        value,
        _arguments.splits_of(splits, "alltoall"),
        operation_name("alltoall", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    )
