"""Compares the epoch number and learning rates of all ranks when an epoch begins."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tfdist import errors
from tfdist.collectives.consistency.comparison import equal_on_all_ranks
from tfdist.collectives.consistency.fingerprint import digest
from tfdist.collectives.objects import allgather_object
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of


def check_same_epoch(
    epoch: int, rates: Sequence[float], process_set: ProcessSet | None
) -> None:
    """Checks that all ranks begin the same epoch with the same learning rates.

    One small reduction compares a hash of the rates, because the ranks may have
    different numbers of rates.

    Args:
        epoch: indexed from 0.
        rates: the learning rates that are numbers, in the same order on all ranks.
        process_set: the ranks that train; None for all.

    Raises:
        tfdist.MismatchError: the values differ. All ranks raise it, and the message
            contains the values of each rank.
    """
    if runtime.size() == 1:
        return
    packed = struct.pack(f"<{len(rates)}d", *rates)
    bits = digest(packed)
    if equal_on_all_ranks([epoch, bits], "comparison of learning rates", process_set):
        return
    shared = allgather_object(
        [epoch, list(rates)], name="epochs and learning rates", process_set=process_set
    )
    shown = "; ".join(
        f"rank {rank}: epoch {own[0] + 1}, {_shown(own[1])}"
        for rank, own in zip(members_of(process_set), shared, strict=True)
        if own is not None  # None if the rank has joined
    )
    raise errors.MismatchError(
        f"The ranks do not begin the same epoch with the same learning rate ({shown}). "
        "A callback has changed it on some ranks only. Use values that are equal on "
        "all ranks in this callback, or wrap it in tfdist.callbacks.RankZeroOnly."
    )


def _shown(rates: Sequence[float]) -> str:
    if not rates:
        return "no numeric learning rate"
    listed = ", ".join(map(str, rates))
    return f"learning rate{'s' if len(rates) > 1 else ''} {listed}"
