"""The agreement of all ranks on the epoch that begins and on its learning rates."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import tensorflow as tf

from tfdist import _runtime, errors
from tfdist._process_sets import ProcessSet, members_of
from tfdist.collectives import ReduceOp, allreduce
from tfdist.objects import allgather_object


def agree_on_epoch(
    epoch: int, rates: Sequence[float], process_set: ProcessSet | None
) -> None:
    """Checks that all ranks begin the same epoch with the same learning rates.

    One small reduction, by MAX: what is equal everywhere has the same largest value
    and the same largest complement (which turns the order round). Of the rates, whose
    number may differ, a hash is compared.

    Args:
        epoch: indexed from 0.
        rates: the learning rates that are numbers, in the same order on all ranks.
        process_set: the ranks that train; None for all.

    Raises:
        tfdist.MismatchError: on all ranks, with the values of each.
    """
    if _runtime.size() == 1:
        return
    packed = struct.pack(f"<{len(rates)}d", *rates)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    bits = int.from_bytes(digest, "little", signed=True)
    largest = allreduce(
        tf.constant([epoch, ~epoch, bits, ~bits], tf.int64),
        op=ReduceOp.MAX,
        name="callbacks.epoch",
        process_set=process_set,
    ).numpy()
    if largest[0] == ~largest[1] and largest[2] == ~largest[3]:
        return
    shared = allgather_object(
        [epoch, list(rates)], name="callbacks.epochs", process_set=process_set
    )
    shown = "; ".join(
        f"rank {rank}: epoch {own[0] + 1}, {_shown(own[1])}"
        for rank, own in zip(members_of(process_set), shared, strict=True)
        if own is not None  # it has joined
    )
    raise errors.MismatchError(
        f"The ranks do not begin the same epoch with the same learning rate ({shown}). "
        "A callback has changed it on some ranks only: let it decide on what is equal "
        "on all ranks, or put it into tfdist.callbacks.RankZeroOnly."
    )


def _shown(rates: Sequence[float]) -> str:
    if not rates:
        return "no learning rate that is a number"
    listed = ", ".join(map(str, rates))
    return f"learning rate{'s' if len(rates) > 1 else ''} {listed}"
