"""Checks how the losses of a model are reduced over a batch."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfdist.collectives import ReduceOp
from tfdist.collectives.consistency.in_step import may_have_other_ranks
from tfdist.core import runtime

_logger = logging.getLogger("tfdist")
SUMS = ("sum", "none", None)  # not divided by the number of samples


def reductions_of(model: keras.Model) -> set[Any]:
    """Returns the `reduction` values of the loss objects passed to `compile`."""
    compiled = getattr(model, "_compile_loss", None)
    losses = keras.tree.flatten(getattr(compiled, "_user_loss", None))
    return {one.reduction for one in losses if isinstance(one, keras.losses.Loss)}


def warn_of_reductions(model: keras.Model, first: int) -> None:
    """Warns of a loss whose averaged gradient differs from the one-process gradient.

    Args:
        model: the model in `fit`.
        first: the rank that logs the warning.
    """
    optimizer = getattr(model, "optimizer", None)
    options = getattr(optimizer, "tfdist_options", None)
    if options is None or options.op != ReduceOp.AVERAGE:
        return
    if not may_have_other_ranks() or runtime.rank() != first:
        return
    reductions = reductions_of(model)
    for reduction in (one for one in SUMS if one in reductions):
        _logger.warning(
            "The model has a loss with reduction=%r, a sum over the samples, but the "
            "gradients of the ranks are averaged. The averaged gradient is only as "
            "large as the gradient of one rank's batch. Use DistributedOptimizer("
            "optimizer, op=tfdist.ReduceOp.SUM) for the sum over all ranks, or omit "
            "reduction for the mean.",
            reduction,
        )
    if "mean_with_sample_weight" in reductions:
        _logger.warning(
            "The model has a loss with reduction='mean_with_sample_weight'. All ranks "
            "have equal weight in a step, even if their sums of sample weights differ. "
            "With sample_weight or class_weight, a step therefore differs from that of "
            "one process. Omit reduction to divide the loss by the number of samples."
        )
