"""Shares state and gradient lists between the ranks of a new generation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.collectives.consistency.comparison import equal_on_all_ranks
from tfdist.collectives.consistency.fingerprint import (
    digest_of_fingerprints,
    fingerprints,
)
from tfdist.collectives.consistency.in_step import counts_in_graphs, restart_counts
from tfdist.collectives.objects import broadcast_object
from tfdist.collectives.signature import register_again, registered_lists
from tfdist.core import engines, native, runtime, weights_state
from tfdist.core.generations import Generations
from tfdist.core.rendezvous import settings_check

NEWCOMER_COMMITS = -1  # number of commits of a process that has no state yet
_MAX_LIST_BYTES = 64 << 20


@dataclass(frozen=True)
class Newest:
    """The newest state, with which all ranks of a new generation continue.

    Attributes:
        root: the lowest of the ranks with the most commits; it has the state.
        committed: number of commits of `root`.
        is_everywhere: whether every rank has this number of commits.
    """

    root: int
    committed: int
    is_everywhere: bool


def check_supported() -> None:
    """Raises ValueError if the program uses a feature that elastic jobs do not have."""
    if runtime.live_sets():
        raise ValueError(
            "Process sets cannot be used in an elastic job, because its ranks change. "
            "Remove them, or start the job without --min-np."
        )
    if runtime.setting("TFDIST_TIMELINE"):
        raise ValueError(
            "A timeline cannot be recorded in an elastic job. Unset TFDIST_TIMELINE, "
            "or start the job without --min-np."
        )
    if engines.requested() != engines.NATIVE:
        raise ValueError(
            "Only the native engine can run an elastic job. Unset TFDIST_ENGINE, or "
            "start the job without --min-np."
        )
    if runtime.shutdowns():  # tfdistrun does not know of generations that init begins
        raise ValueError(
            "tfdist.shutdown() was called before the training of an elastic job. Call "
            "it only after the training, or start the job without --min-np."
        )


def enter_next(
    generations: Generations,
    committed: int,
    lines: Sequence[str],
    share: Callable[[Newest], None],
) -> None:
    """Connects this process with the ranks of the next generation.

    The gradient lists that traced functions use are registered again, so that nothing
    has to be traced again. If the job cannot continue, the weights may still be saved,
    because the caller has restored them to the last commit.

    Args:
        generations: the generations of this process.
        committed: number of commits of this process; `NEWCOMER_COMMITS` if it has no
            state yet.
        lines: description of the state, which has to be equal on all ranks.
        share: function that gives all ranks the newest state. It may use collective
            operations. All ranks call the function, again if a rank is lost meanwhile.

    Raises:
        tfdist.RankFailedError: the job cannot continue; the message says why.
    """
    lists, counts = registered_lists(), counts_in_graphs()

    def share_all() -> None:
        nonlocal lists
        newest = _find_newest(committed)
        lists = _register_lists_of(newest.root, lists)
        restart_counts(counts)
        share(newest)

    try:
        generations.enter_next(committed, _program_of(lines), share_all)
    except native.CoreError as error:
        weights_state.note_between_steps()
        runtime.raise_public(error)


def check_arrived(values: Sequence[Any], root: int) -> None:
    """Raises on all ranks if the values that rank `root` has sent differ on a rank.

    Args:
        values: the sent variables or tensors on `root`; on other ranks, the received
            ones.
        root: the rank that has sent the values.

    Raises:
        tfdist.MismatchError: the values differ.
    """
    own = digest_of_fingerprints(fingerprints(values))
    if not equal_on_all_ranks([own], "elastic.fingerprint", None):
        raise errors.MismatchError(
            f"The state that rank {root} has sent arrived with different values on a "
            "rank. Check the memory of the hosts."
        )


def is_loss(error: Exception) -> bool:
    """Returns whether an operation has failed because a rank was lost.

    Args:
        error: an exception of TensorFlow or tfdist.
    """
    ours = errors.from_tf(error)
    if ours is None and isinstance(error, tf.errors.OpError):
        # TensorFlow may report a different operation, which it has cancelled.
        lost = native.failure()
        ours = errors.from_core(lost) if lost is not None else None
    # This includes EvictedError: tfdistrun decides whether an excluded rank continues.
    return isinstance(ours, errors.RankFailedError)


def _find_newest(committed: int) -> Newest:
    rows = collectives.allgather(
        tf.constant([committed], tf.int64), name="elastic.committed"
    )
    counts = [int(one) for one in rows.numpy()]
    latest = max(counts)
    return Newest(int(np.argmax(counts)), latest, min(counts) == latest)


def _register_lists_of(
    root: int, lists: list[tuple[str, list[bool]]]
) -> list[tuple[str, list[bool]]]:
    """Registers the gradient lists of rank `root` on all ranks; returns the lists."""
    known = broadcast_object(
        [[description, flags] for description, flags in lists],
        root,
        name="elastic.lists",
        max_bytes=_MAX_LIST_BYTES,
    )
    lists = [(description, flags) for description, flags in known]
    register_again(lists)
    return lists


def _program_of(lines: Sequence[str]) -> str:
    """Returns a hash of the versions and the state's description."""
    text = repr((sorted(settings_check.versions().items()), list(lines)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
