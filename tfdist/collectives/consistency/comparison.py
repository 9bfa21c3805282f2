"""Compares the ranks' training states in eager mode, with one reduction if equal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import ReduceOp, allreduce
from tfdist.collectives.consistency.explanation import (
    SETTING,
    RankState,
    explain,
    text_of,
)
from tfdist.collectives.consistency.fingerprint import digest, digest_of_fingerprints
from tfdist.collectives.objects import allgather_object
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of

_logger = logging.getLogger("tfdist")
# Largest size of a rank's state (names and hashes of variables). It is enough for
# 32,000 variables with paths of 200 characters.
_MAX_BYTES = 8 << 20


def is_on() -> bool:
    """Returns whether weights are compared at all (`TFDIST_WEIGHT_CHECK`)."""
    return bool(runtime.setting(SETTING) != "off")


def only_warns(text: str) -> bool:
    """Returns whether `TFDIST_WEIGHT_CHECK=warn`; if so, logs `text` as a warning."""
    warns = bool(runtime.setting(SETTING) == "warn")
    if warns:
        _logger.warning("%s", text)
    return warns


def equal_on_all_ranks(
    numbers: Sequence[int], name: str, process_set: ProcessSet | None
) -> bool:
    """Returns whether all ranks have the same 64-bit integers; ignores joined ranks.

    Uses one reduction by MAX of the numbers and their complements. The complement
    reverses the order, so the numbers are equal on all ranks if the two maxima are
    complements of each other.

    Args:
        numbers: integers from -2**63 to 2**63 - 1, the same number of them on every
            rank.
        name: operation name; calls with the same name on different ranks are matched.
        process_set: ranks that call it; None: all ranks.
    """
    own = np.asarray(numbers, np.int64)
    largest = allreduce(
        tf.constant(np.concatenate([own, ~own])),
        op=ReduceOp.MAX,
        name=name,
        process_set=process_set,
    ).numpy()
    return bool(np.array_equal(largest[: len(own)], ~largest[len(own) :]))


def compare(
    state: RankState,
    when: str,
    process_set: ProcessSet | None,
    *,
    is_first: bool,
    name: str = "comparison of weights",
    advice: str = "",
) -> None:
    """Compares the states of all ranks; every rank of the set calls it.

    Args:
        state: this rank's state.
        when: time of the comparison, for the message, e.g. "at the end of epoch 1".
        process_set: ranks that train together; None: all ranks.
        is_first: whether the ranks may have started with different weights.
        name: operation name; calls with the same name on different ranks are matched.
        advice: sentences at the end of the error message.

    Raises:
        tfdist.MismatchError: on all ranks, if the states differ. The message names the
            first variable that differs, or the callback that could decide differently
            on different ranks.
    """
    if len(members_of(process_set)) == 1:
        return
    numbers = [
        digest_of_fingerprints(state.fingerprints),
        digest(repr((list(state.names), text_of(state.decisions))).encode()),
    ]
    if equal_on_all_ranks(numbers, name, process_set):
        return
    shared = allgather_object(
        {
            "names": list(state.names),
            "kinds": list(state.kinds),
            "fingerprints": list(state.fingerprints),
            "were_broadcast": state.were_broadcast,
            "decisions": state.decisions,
            "monitors": state.monitors,
        },
        name=f"{name}.states",
        max_bytes=_MAX_BYTES,
        process_set=process_set,
    )
    states = [
        RankState(rank=rank, **other)
        for rank, other in zip(members_of(process_set), shared, strict=True)
        if other is not None  # None if the rank has joined
    ]
    text = f"{explain(states, when, is_first=is_first)} {advice}".rstrip()
    if not only_warns(text):
        record = errors.ErrorRecord(kind="mismatch", cause=text)
        raise errors.MismatchError(text, record)


def plain(value: Any) -> Any:
    """Converts a NumPy number to a Python number, which can be sent and compared."""
    return value.item() if isinstance(value, np.generic) else value
