"""barrier: waits for all ranks."""

from __future__ import annotations

from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import ProcessSet, id_of


def barrier(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Waits until every rank has called it.

    In a `tf.function` it keeps its place among the function's effects.

    Args:
        name: pairs the calls of the ranks; default the place in the traced function.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Raises:
        ValueError: `timeout_s` is not above 0.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: a rank did not come within `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.

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
