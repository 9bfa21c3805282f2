"""barrier: waits for all ranks."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


@tf.autograph.experimental.do_not_convert
def barrier(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Waits until every rank has called `barrier`.

    In a `tf.function`, the barrier runs in program order with the function's other side
    effects.

    Args:
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Raises:
        ValueError: `timeout_s` is not above 0.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not make the call within `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.barrier()
    """
    emit.barrier(
        operation_name("barrier", name, process_set=id_of(process_set)),
        timeout_s,
        process_set=id_of(process_set),
    )
