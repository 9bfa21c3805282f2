"""Emits one reduction operation per bucket of a group of gradients.

In a function that XLA compiles it is one operation for all buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import collectives, errors
from tfdist.collectives.signature import path_of
from tfdist.core import runtime
from tfdist.core.process_sets import id_of
from tfdist.gradients import xla
from tfdist.gradients.bucket_plan import plan_buckets
from tfdist.gradients.bucketing import cut_groups
from tfdist.gradients.options import ReduceOptions

# With the gate: what an eager call of a group runs, by group and options.
_FUNCTIONS: dict[tuple[Any, ...], Any] = {}


def gated() -> bool:
    """Whether the buckets of a step end together (`TFDIST_ATOMIC_STEPS=1`)."""
    return bool(runtime.setting("TFDIST_ATOMIC_STEPS"))


def reduce_buckets(
    tensors: list[tf.Tensor | None],
    group_id: str,
    options: ReduceOptions,
    variables: Sequence[Any],
    *,
    made: Sequence[Any],
    in_xla: bool = False,
) -> list[tf.Tensor | None]:
    """Emits one operation for each bucket of the tensors that are not `None`.

    Args:
        tensors: one for each variable of the group, as it is sent, or `None`.
        group_id: of `agreement`.
        options: operation, name and process set.
        variables: of the group, for buckets by hand.
        made: the gradients as this rank makes them, or `None`.
        in_xla: `xla.reduced_by_xla()`: emits one operation for all buckets.

    Returns:
        The reduced tensors, `None` where `tensors` has `None`.
    """
    op, process_set = options.op, options.process_set
    name = options.name or "gradients"
    pairs = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None]
    indices = [i for i, _ in pairs]
    chosen = [tensor for _, tensor in pairs]
    sizes = [t.shape.num_elements() * t.dtype.size for t in chosen]
    by_hand: list[list[int]] = []
    if options.manual_buckets is not None:
        known = dict(zip(indices, sizes, strict=True))
        places = {index: place for place, index in enumerate(indices)}
        all_sizes = [known.get(i) for i in range(len(tensors))]
        for members in options.manual_buckets.places(variables, all_sizes):
            by_hand.append([places[i] for i in members])

    def cut_along(order: Sequence[int] | None) -> list[list[int]]:
        return cut_groups(
            sizes,
            [t.dtype for t in chosen],
            by_hand,
            first_bytes=runtime.setting("TFDIST_FIRST_BUCKET_BYTES"),
            bucket_bytes=runtime.setting("TFDIST_BUCKET_BYTES"),
            fusion_bytes=runtime.setting("TFDIST_FUSION_BYTES"),
            order=order,
        )

    if in_xla:  # one operation for all
        buckets = cut_along(None)
    else:
        buckets = plan_buckets(
            cut_along,
            [made[i] for i in indices],
            sizes,
            [path_of(variables[i]) for i in indices],
            f"{name}.{group_id[:8]}",
            group_id,
            process_set,
        )

    def emit(*inputs: tf.Tensor) -> list[tf.Tensor]:
        outputs: list[Any] = list(inputs)
        for number, bucket in enumerate(buckets):
            ends = collectives.allreduce_bucket(
                [inputs[i] for i in bucket],
                group_id=group_id,
                bucket=number,
                bucket_count=len(buckets),
                tensor_indices=[indices[i] for i in bucket],
                op=op,
                name=f"{name}.{group_id[:8]}.{number}",
                timeout_s=None,
                process_set=process_set,
            )
            for i, end in zip(bucket, ends, strict=True):
                outputs[i] = end
        return outputs

    def emit_at_once(*inputs: tf.Tensor) -> list[tf.Tensor]:
        order = [i for bucket in buckets for i in bucket]
        ends = xla.emit_group(
            [inputs[i] for i in order],
            sizes=[len(bucket) for bucket in buckets],
            tensor_indices=[indices[i] for i in order],
            group_id=group_id,
            name=f"{name}.{group_id[:8]}",
            op=op,
            process_set=id_of(process_set),
        )
        outputs = dict(zip(order, ends, strict=True))
        return [outputs[i] for i in range(len(inputs))]

    if in_xla and chosen:
        emit = emit_at_once
    elif len(buckets) > 1 and tf.executing_eagerly() and gated():
        # Called one by one, the first would wait for ever for the others of its step.
        # The cut too: after another init() other gradients of the list may be None.
        cut = (tuple(indices), tuple(map(tuple, buckets)))
        key = (group_id, name, op, id_of(process_set), cut)
        emit = _FUNCTIONS.setdefault(key, tf.function(emit, jit_compile=False))
    reduced = list(tensors)
    with errors.translate():  # those of a function of our own, in an eager call
        outputs = emit(*chosen)
    for index, output in zip(indices, outputs, strict=True):
        reduced[index] = output
    return reduced
