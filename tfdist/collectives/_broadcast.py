"""broadcast: every rank gets the values of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def broadcast(
    tensor: Any,
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Gives every rank the value that `tensor` has on rank `root`.

    Args:
        tensor: tensor of any numeric dtype (float8 too) or bool and any shape `S`, the
            same on every rank; only the value on `root` counts.
        root: the rank whose value is taken, the same on every rank; default 0.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Tensor of shape `S`. Differentiable: the root gets the sum of all ranks'
        gradients, the others zeros.

    Raises:
        TypeError: it holds no numbers (texts: `tfdist.broadcast_object`).
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: shapes, dtypes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> int(tfdist.broadcast(tf.constant(7)))
        7
    """
    value = _arguments.tensor_of(tensor, "broadcast")
    return emit.broadcast(
        [value],
        root,
        operation_name("broadcast", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    )[0]


def grouped_broadcast(
    tensors: Sequence[Any],
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Broadcasts a list of tensors, in few operations instead of one for each.

    Args:
        tensors: as in `broadcast`; the same number, shapes and dtypes on every rank.
        root: the rank whose values are taken; default 0.
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        The root's values, in the order of `tensors`.

    Raises:
        TypeError: it holds no numbers (texts: `tfdist.broadcast_object`).
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: shapes, dtypes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
    """
    values = [_arguments.tensor_of(t, "grouped_broadcast") for t in tensors]
    base = operation_name("grouped_broadcast", name, process_set=id_of(process_set))
    received: list[tf.Tensor | None] = [None] * len(values)
    for number, batch in enumerate(_arguments.batches_of(values)):
        outputs = emit.broadcast(
            [values[i] for i in batch],
            root,
            f"{base}.{number}" if number else base,
            timeout_s,
            process_set=id_of(process_set),
        )
        for index, output in zip(batch, outputs, strict=True):
            received[index] = output
    return received
