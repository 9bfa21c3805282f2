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

# Functions that every rank calls with the id of the process set after a join.
after_join: list[Callable[[int], None]] = []


def join(
    *, timeout_s: float | None = None, process_set: ProcessSet | None = None
) -> int:
    """Reports that this rank has no more data; returns when all ranks have joined.

    Until then, this rank takes part in the collectives that the other ranks call:

    ======================  ============================================================
    operation               contribution of this rank, and the result that it gets
    ======================  ============================================================
    allreduce, reduce       the identity (0 for a sum, 1 for a product, ...)
    average                 nothing; the average is over the ranks that make the call
    reduce_scatter          the identity; the received part is discarded
    allgather, alltoall,    no rows; received rows are discarded
    gather
    broadcast, scatter      received values are discarded; an error if this rank is root
    barrier                 nothing; no rank waits for this rank
    ======================  ============================================================

    `send` and `recv` involve only two ranks and wait as usual. This rank does not
    update its weights while other ranks run more steps. Afterwards, broadcast the state
    of the rank that `join` returns. In `model.fit`, `tfdist.callbacks.UnevenData`
    calls `join` and sends this state.

    Call `join` in eager mode, after all earlier calls have returned their results.
    Until `join` returns, this rank must not call any other operation of the process
    set in any thread.

    Args:
        timeout_s: seconds to wait without any call from the other ranks; default
            `TFDIST_TIMEOUT_S`.
        process_set: ranks that join; only they make the call. Default: all ranks.

    Returns:
        The lowest of the ranks that called every operation themselves; the same value
        on all ranks.

    Raises:
        tfdist.MismatchError: on every rank, if a rank that has joined is the root of a
            broadcast or scatter, or if process sets were changed during the join.
        tfdist.RankFailedError: a rank died or failed.
        tfdist.TimeoutError: the other ranks made no call for `timeout_s`.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
        RuntimeError: called in a `tf.function`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> for own in [1.0, 2.0]:                       # this rank's values
        ...     total = tfdist.allreduce(tf.constant(own))
        >>> tfdist.join()
        0
    """
    return join_all(timeout_s=timeout_s, process_set=process_set)[0]


def join_all(
    *, timeout_s: float | None = None, process_set: ProcessSet | None = None
) -> tuple[int, int]:
    """Acts as `join`; also returns how many ranks called every operation themselves.

    If this number is smaller than the number of ranks, some operations ran after a rank
    had joined.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "tfdist.join cannot be called in a tf.function: it blocks until all ranks "
            "have called it. Call it after the loop over the data."
        )
    runtime.check_initialized()
    engines.refuse("tfdist.join, and with it callbacks.UnevenData")
    wait = native.timeout_of(timeout_s)
    one_rank_code.check_not_alone("tfdist.join", id_of(process_set))
    claim([key_of("join", process_set=id_of(process_set))])
    # Runs in a separate thread, so that Ctrl-C is handled.
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
