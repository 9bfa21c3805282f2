"""Mixins for `op=ReduceOp.ADASUM`: ranks take their own steps, which are combined.

Adasum combines the updates that each rank would make on its own. For a stateful
optimizer, the update is the change of the weights, not the gradient: each rank takes
its own step, Adasum reduces the changes, and the result is added to the weights from
before the step. Each rank keeps its own slots (momentum, ...).

References:
    S. Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021
    (arXiv:2006.02924), on stateful optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.consistency.in_step import may_have_other_ranks
from tfdist.collectives.per_rank_variables import declare, tf_variable
from tfdist.gradients import nan_policy, reduction
from tfdist.gradients.bucket_ops import gated
from tfdist.training.loss_scale import ReducingWithAddedScale
from tfdist.training.optimizer_mixins import Reducing


class ReducingChanges(Reducing):
    """Mixin for an optimizer that reduces the changes of its variables with Adasum."""

    def _reduced(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        self._build_outside_of_branches(variables)
        _check_supported(self)
        if weight is not None:
            reduction.check_weights(variables, self.tfdist_options)
        return super()._reduced(grads, variables, weight)

    def reduce_for_update(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Returns this rank's dense gradients, zero where only other ranks have one."""
        why = "op=tfdist.ReduceOp.ADASUM is used"
        options = self.tfdist_options
        return reduction.fill_missing(grads, variables, options, why=why)

    def _update_if_finite(
        self, update: Callable[..., Any], grads: list[Any], variables: list[Any]
    ) -> Any:
        options = self.tfdist_options
        declare(own_slots(self))
        if not may_have_other_ranks(options.process_set):
            return super()._update_if_finite(update, grads, variables)
        local = set(options.local_places(variables))
        before = {
            i: tf.identity(tf_variable(variables[i]))
            for i, grad in enumerate(grads)
            if grad is not None and i not in local
        }
        result = super()._update_if_finite(update, grads, variables)
        changes: list[Any] = [None for _ in variables]
        for i, old in before.items():
            changes[i] = tf.convert_to_tensor(tf_variable(variables[i])) - old
            variables[i].assign(old)  # until the changes of all ranks are known
        changes = reduction.reduce_gradients(changes, variables, options)
        for i, old in before.items():
            constraint = getattr(variables[i], "constraint", None)
            new = old + changes[i]
            variables[i].assign(new if constraint is None else constraint(new))
        return result

    def _on_all_ranks(self, found: Any) -> Any:
        options = self.tfdist_options
        return nan_policy.true_on_all_ranks(found, options.process_set, options.name)


class ReducingChangesWithAddedScale(ReducingChanges, ReducingWithAddedScale):
    """`ReducingChanges` for the `LossScaleOptimizer` that tfdist adds."""


WITH_ADASUM: dict[Any, Any] = {
    Reducing: ReducingChanges,
    ReducingWithAddedScale: ReducingChangesWithAddedScale,
}


def own_slots(optimizer: Any) -> list[Any]:
    """Returns the slots that differ between ranks because of Adasum, or [].

    Args:
        optimizer: a Keras optimizer, wrapped or not.
    """
    options = getattr(optimizer, "tfdist_options", None)
    if options is None or options.op is not ReduceOp.ADASUM:
        return []
    return [
        variable
        for one in _inner(optimizer)
        for variable in one.variables
        if variable is not one.iterations and variable is not one._learning_rate
    ]


def _inner(optimizer: Any) -> list[Any]:
    """Returns the optimizers that have slots."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_inner_optimizers", [inner]))


def _check_supported(optimizer: Any) -> None:
    schedule_free = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    for one in _inner(optimizer):
        for option, remedy in (
            ("gradient_accumulation_steps", "Use a larger batch"),
            ("use_ema", "Average the weights with a callback"),
        ):
            if getattr(one, option, None):
                raise ValueError(
                    f"{option} cannot be used with DistributedOptimizer(op="
                    f"tfdist.ReduceOp.ADASUM), got {getattr(one, option)!r} for "
                    f"{one.name!r}. {remedy}, or use op=tfdist.ReduceOp.AVERAGE."
                )
        if isinstance(one, schedule_free):
            raise ValueError(
                "DistributedOptimizer(op=tfdist.ReduceOp.ADASUM) does not support "
                "ScheduleFreeAdamW, whose slots include a second set of weights. Use a "
                "different optimizer, or op=tfdist.ReduceOp.AVERAGE."
            )
    if gated():
        raise ValueError(
            "TFDIST_ATOMIC_STEPS=1 cannot be used with DistributedOptimizer(op="
            "tfdist.ReduceOp.ADASUM): each rank takes its own step before steps are "
            "combined. Unset the variable, or use op=tfdist.ReduceOp.AVERAGE."
        )
