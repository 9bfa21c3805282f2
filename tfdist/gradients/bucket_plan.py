"""Assignment of the gradients of a list to buckets, with one operation per bucket.

All ranks compute the same plan from the sizes and types of the gradients. In a traced
function, the buckets may follow the order in which the graph computes the gradients
(`TFDIST_BUCKET_ORDER`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.signature import path_of
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, id_of, members_of
from tfdist.gradients import ready_order
from tfdist.gradients.agreement import agree_on_order
from tfdist.gradients.bucketing import cut_groups
from tfdist.gradients.graph_levels import levels_of
from tfdist.gradients.options import ReduceOptions

_logger = logging.getLogger("tfdist")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A plan of the operations that reduce a gradient list.

    Attributes:
        group_id: id of the list, on which the ranks have agreed (`agreement`).
        name: common part of the operation names, to which each bucket's number is
            appended.
        op: reduction operation that combines the ranks' gradients.
        process_set: id of the ranks that take part.
        buckets: for each operation, the indices of its gradients in the list.
    """

    group_id: str
    name: str
    op: ReduceOp
    process_set: int
    buckets: tuple[tuple[int, ...], ...]

    def places(self) -> list[int]:
        """Returns the indices of all reduced gradients, bucket by bucket."""
        return [place for bucket in self.buckets for place in bucket]


def plan_buckets(
    tensors: Sequence[tf.Tensor | None],
    local_grads: Sequence[Any],
    variables: Sequence[Any],
    group_id: str,
    options: ReduceOptions,
    *,
    in_xla: bool = False,
) -> BucketPlan:
    """Plans the buckets of a gradient list; the plan is the same on all ranks.

    Args:
        tensors: for each variable, the encoded gradient, or None if it is not reduced
            in a bucket.
        local_grads: the gradients that this rank's graph computes; None for a missing
            gradient.
        variables: the variables of the list.
        group_id: id of the list.
        options: operation, name, process set, and the user's manual buckets.
        in_xla: whether one XLA operation reduces all buckets; the order of the buckets
            then has no effect.
    """
    pairs = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None]
    places, sent = [i for i, _ in pairs], [tensor for _, tensor in pairs]
    sizes = [t.shape.num_elements() * t.dtype.size for t in sent]
    manual: list[list[int]] = []
    if options.manual_buckets is not None:
        size_of, position_of = dict(zip(places, sizes, strict=True)), _inverse(places)
        all_sizes = [size_of.get(i) for i in range(len(tensors))]
        for bucket in options.manual_buckets.places(variables, all_sizes):
            manual.append([position_of[i] for i in bucket])

    def cut(order: Sequence[int] | None) -> list[list[int]]:
        return cut_groups(
            sizes,
            [t.dtype for t in sent],
            manual,
            first_bytes=runtime.setting("TFDIST_FIRST_BUCKET_BYTES"),
            bucket_bytes=runtime.setting("TFDIST_BUCKET_BYTES"),
            fusion_bytes=runtime.setting("TFDIST_FUSION_BYTES"),
            order=order,
        )

    name = f"{options.name or 'gradients'}.{group_id[:8]}"
    # In eager mode all gradients exist before the first bucket is reduced.
    if in_xla or tf.executing_eagerly() or len(sent) < 2:
        buckets = cut(None)
    else:
        buckets = _cut_traced(
            cut,
            [local_grads[i] for i in places],
            sizes,
            [path_of(variables[i]) for i in places],
            name,
            group_id,
            options.process_set,
        )
    return BucketPlan(
        group_id,
        name,
        options.op,
        id_of(options.process_set),
        tuple(tuple(places[i] for i in bucket) for bucket in buckets),
    )


def _inverse(places: Sequence[int]) -> dict[int, int]:
    return {place: position for position, place in enumerate(places)}


def _cut_traced(
    cut: Callable[[Sequence[int] | None], list[list[int]]],
    local_grads: Sequence[Any],
    sizes_bytes: Sequence[int],
    paths: Sequence[str],
    name: str,
    group_id: str,
    process_set: ProcessSet | None,
) -> list[list[int]]:
    """Cuts buckets in reverse list order or in the order of the lowest rank's graph.

    With `TFDIST_BUCKET_ORDER=traced`, the order is that of the graph. With `reverse`,
    the lowest rank logs what `traced` would gain, as a warning if the gain is large.
    """
    listed = cut(None)
    is_observed = runtime.setting("TFDIST_BUCKET_ORDER") == "traced"
    is_lowest = members_of(process_set)[0] == runtime.rank()
    if not (is_observed or is_lowest):
        return listed
    levels = ready_order.filled(levels_of(local_grads))
    order = ready_order.order_of(levels)
    if is_observed:
        buckets = cut(agree_on_order(order, group_id, process_set))
        if is_lowest:
            _logger.debug("%s: %d buckets, in traced order", name, len(buckets))
        return buckets
    found = ready_order.compare(listed, cut(order), levels, sizes_bytes)
    _report(found, name, paths[found.early], paths[found.late])
    return listed


@functools.lru_cache(maxsize=4096)  # logs once, even if a function is retraced
def _report(found: ready_order.Comparison, group: str, early: str, late: str) -> None:
    _logger.log(
        logging.WARNING if found.matters else logging.DEBUG,
        "%s: of %.1f MiB of gradients, %.1f MiB are not yet reduced when the last "
        "gradient is ready. If buckets followed the order in which the traced function "
        "computes the gradients, this would be %.1f MiB (for a backward pass as long "
        "as the reduction). Bucket %d delays the most bytes, because %s waits for %s. "
        "Set TFDIST_BUCKET_ORDER=traced to use this order, with the same results "
        "(docs/gradients-advanced.md).",
        group,
        found.total_bytes / _MIB,
        found.listed_bytes / _MIB,
        found.observed_bytes / _MIB,
        found.held,
        early,
        late,
    )
