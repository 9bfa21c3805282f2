"""Emits the operations that reduce the buckets of a gradient list."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.tf_ops import emit
from tfdist.core import runtime
from tfdist.gradients import xla
from tfdist.gradients.bucket_plan import BucketPlan
from tfdist.gradients.update_order import hold_updates


def gated() -> bool:
    """Returns whether atomic steps are on: the buckets of a step complete together."""
    return bool(runtime.setting("TFDIST_ATOMIC_STEPS"))


def reduce_buckets(
    plan: BucketPlan, tensors: list[tf.Tensor | None], *, in_xla: bool = False
) -> list[tf.Tensor | None]:
    """Emits the operations that reduce a gradient list.

    Args:
        plan: the assignment of the gradients to buckets.
        tensors: for each variable of the list, the encoded gradient or `None`.
        in_xla: whether to emit one operation for all buckets; the result of
            `xla.reduced_by_xla()`.

    Returns:
        The reduced tensors; `None` for each `None` in `tensors`.
    """
    places = plan.places()
    if in_xla and places:
        emit_plan = functools.partial(_emit_in_xla, plan)
    elif len(plan.buckets) > 1 and tf.executing_eagerly() and gated():
        emit_plan = _function_of(plan)
    else:
        emit_plan = functools.partial(_emit_buckets, plan)
    with errors.translate():  # an eager call runs a tf.function of tfdist
        outputs = emit_plan(*(tensors[i] for i in places))
    if gated():
        # A failed step must not even change the step count.
        hold_updates(outputs)
    reduced = list(tensors)
    for place, output in zip(places, outputs, strict=True):
        reduced[place] = output
    return reduced


def _emit_buckets(plan: BucketPlan, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Emits one operation per bucket; it runs when the bucket's gradients are ready."""
    remaining = iter(tensors)
    outputs: list[tf.Tensor] = []
    for number, bucket in enumerate(plan.buckets):
        outputs += emit.allreduce(
            [next(remaining) for _ in bucket],
            f"{plan.name}.{number}",
            plan.op,
            "1.0",
            "1.0",
            None,
            tensor_indices=bucket,
            group=plan.group_id,
            bucket=number,
            bucket_count=len(plan.buckets),
            process_set=plan.process_set,
        )
    return outputs


@functools.lru_cache(maxsize=4096)
def _function_of(plan: BucketPlan) -> Any:
    """Returns a `tf.function` that runs all buckets of an eager call together.

    With `TFDIST_ATOMIC_STEPS=1`, the operations of all buckets complete together. If
    they were called one after another, the first operation would wait forever.
    """
    return tf.function(functools.partial(_emit_buckets, plan), jit_compile=False)


def _emit_in_xla(plan: BucketPlan, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Emits one operation for all buckets, in a function that XLA compiles."""
    return xla.emit_group(
        tensors,
        sizes=[len(bucket) for bucket in plan.buckets],
        tensor_indices=plan.places(),
        group_id=plan.group_id,
        name=plan.name,
        op=plan.op,
        process_set=plan.process_set,
    )
