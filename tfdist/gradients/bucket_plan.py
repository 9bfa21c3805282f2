"""Which gradients of a traced function share a bucket (`TFDIST_BUCKET_ORDER`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.gradients import ready_order
from tfdist.gradients.agreement import agree_on_order
from tfdist.gradients.ready_levels import levels_of

_logger = logging.getLogger("tfdist")
_MIB = 1 << 20


def plan_buckets(
    cut: Callable[[Sequence[int] | None], list[list[int]]],
    made: Sequence[Any],
    sizes_bytes: Sequence[int],
    paths: Sequence[str],
    group: str,
    group_id: str,
    process_set: ProcessSet | None,
) -> list[list[int]]:
    """The buckets of a group of gradients, the same on all ranks.

    With `TFDIST_BUCKET_ORDER=reverse` the lowest rank also says what the order in which
    the gradients are made would gain, where that is much.

    Args:
        cut: makes buckets along an order of the gradients; of None: along the list.
        made: the gradients as this rank's graph makes them; None for one that it lacks.
        sizes_bytes: of each.
        paths: of their variables.
        group: name of the group, for messages.
        group_id: of `agreement`.
        process_set: the ranks that reduce; None: all.
    """
    listed = cut(None)
    if tf.executing_eagerly() or len(made) < 2:
        return listed  # all are there before the first bucket is
    is_observed = runtime.setting("TFDIST_BUCKET_ORDER") == "traced"
    is_lowest = members_of(process_set)[0] == runtime.rank()
    if not (is_observed or is_lowest):
        return listed
    levels = ready_order.filled(levels_of(made))
    order = ready_order.order_of(levels)
    if is_observed:
        buckets = cut(agree_on_order(order, group_id, process_set))
        if is_lowest:
            _logger.debug("%s: %d buckets, in traced order", group, len(buckets))
        return buckets
    found = ready_order.compare(listed, cut(order), levels, sizes_bytes)
    _report(found, group, paths[found.early], paths[found.late])
    return listed


@functools.lru_cache(maxsize=4096)  # a function may be traced again
def _report(found: ready_order.Comparison, group: str, early: str, late: str) -> None:
    _logger.log(
        logging.WARNING if found.matters else logging.DEBUG,
        "%s: of %.1f MiB of gradients %.1f are left to be reduced when the last one is "
        "made; %.1f if buckets followed the order in which the traced function makes "
        "them, not that of the list (in a backward pass as long as the reduction). "
        "Most is held back in bucket %d, where %s waits for %s. "
        "TFDIST_BUCKET_ORDER=traced takes that order, with the same results "
        "(docs/gradients.md).",
        group,
        found.total_bytes / _MIB,
        found.listed_bytes / _MIB,
        found.observed_bytes / _MIB,
        found.held,
        early,
        late,
    )
