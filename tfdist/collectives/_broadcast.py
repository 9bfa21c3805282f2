"""broadcast: every rank gets the value of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import batch_name, operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def broadcast(
    tensor: Any,
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Broadcasts `tensor` from rank `root` to all ranks.

    Args:
        tensor: tensor of any numeric dtype (including float8) or bool and any shape
            `S`. Shape and dtype must be equal on all ranks; only the value on `root` is
            used.
        root: rank whose value is broadcast; must be equal on all ranks. Default: 0.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Tensor of shape `S`. Differentiable: the root gets the sum of the gradients of
        all ranks, the other ranks get zeros.

    Raises:
        TypeError: `tensor` does not hold numbers. Use `tfdist.broadcast_object` for
            strings.
        ValueError: `timeout_s` is not above 0.
        tfdist.MismatchError: shapes, dtypes or roots differ between the ranks.
        tf.errors.InvalidArgumentError: there is no rank `root`.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

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


@tf.autograph.experimental.do_not_convert
def grouped_broadcast(
    tensors: Sequence[Any],
    root: int = 0,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Broadcasts a list of tensors in a few operations instead of one for each tensor.

    Args:
        tensors: as in `broadcast`. Number, shapes and dtypes must be equal on all
            ranks.
        root: rank whose values are broadcast; default 0.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        The root's values, in the order of `tensors`.

    Raises:
        TypeError: a tensor does not hold numbers. Use `tfdist.broadcast_object` for
            strings.
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
            batch_name(base, number),
            timeout_s,
            process_set=id_of(process_set),
        )
        for index, output in zip(batch, outputs, strict=True):
            received[index] = output
    return received
