"""join: lets a rank without data take part in the collectives of the other ranks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.tf_ops.op_names import claim, key_of
from tfdist.core import engines, native, runtime
from tfdist.core.deadlock import one_rank_code
from tfdist.core.process_sets import ProcessSet, id_of

# Called on every rank when a join has ended, with the id of its process set.
after_join: list[Callable[[int], None]] = []


def join(
    *, timeout_s: float | None = None, process_set: ProcessSet | None = None
) -> int:
    """Declares that this rank has no more data; returns when all ranks have joined.

    Until then it takes part in the collectives that the other ranks call:

    ======================  =======================================================
    operation               what this rank contributes, and what becomes of its part
    ======================  =======================================================
    allreduce, reduce       the identity (0 of a sum, 1 of a product, ...)
    an average              nothing: it is over the ranks that call it
    reduce_scatter          the identity; its part is dropped
    allgather, alltoall,    no rows; what it gets is dropped
    gather
    broadcast, scatter      what it gets is dropped; as the root of one: an error
    barrier                 no rank waits for it
    ======================  =======================================================

    `send` and `recv` concern two ranks only and wait as usual. The weights of this rank
    stay behind those of ranks that take more steps: send them the state of the rank
    that is returned. `tfdist.callbacks.UnevenData` does all that in `model.fit`.

    Call it in eager mode, when all earlier calls have returned their results. This rank
    must not call anything else of the process set meanwhile, in another thread either.

    Args:
        timeout_s: seconds for which the others may call nothing; default
            `TFDIST_TIMEOUT_S`.
        process_set: the ranks that join, which alone call it; default all.

    Returns:
        The lowest of the ranks that have called everything themselves; the same on
        all ranks.

    Raises:
        tfdist.MismatchError: on every rank: a rank that has joined is the root of a
            broadcast or scatter, or process sets were changed meanwhile.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the others called nothing for `timeout_s`.
        tfdist.NotInitializedError: before `tfdist.init()`.
        RuntimeError: in a `tf.function`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> for own in [1.0, 2.0]:                       # as many as there are here
        ...     total = tfdist.allreduce(tf.constant(own))
        >>> tfdist.join()
        0
    """
    return join_all(timeout_s=timeout_s, process_set=process_set)[0]


def join_all(
    *, timeout_s: float | None = None, process_set: ProcessSet | None = None
) -> tuple[int, int]:
    """As `join`; also returns how many ranks have called everything themselves.

    If that is fewer than all, a rank that had joined has taken part in calls of others.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "tfdist.join cannot be called in a tf.function: it lasts until all ranks "
            "have called it. Call it after the loop over the data."
        )
    runtime.check_initialized()
    engines.refuse("tfdist.join, and with it callbacks.UnevenData")
    wait = native.timeout_of(timeout_s)
    one_rank_code.check_not_alone("tfdist.join", id_of(process_set))
    claim([key_of("join", process_set=id_of(process_set))])
    # In a thread of its own, so that Ctrl-C gets through.
    outcome: concurrent.futures.Future[tuple[int, int]] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(
                native.join(timeout_s=wait, process_set=id_of(process_set))
            )
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="tfdist-join", daemon=True).start()
    with errors.translate():
        result = outcome.result()
    for notify in after_join:
        notify(id_of(process_set))
    return result
