"""LearningRateScale: multiplies the learning rate by the number of ranks."""

from __future__ import annotations

import logging
from typing import Any

from tfdist.callbacks._base import RankCallback, optimizer_of_one_rate
from tfdist.callbacks._learning_rates import ScalableRate
from tfdist.collectives import ReduceOp
from tfdist.core import runtime
from tfdist.core.process_sets import members_of
from tfdist.core.registry import WeakRegistry

_logger = logging.getLogger("tfdist")
# Optimizers whose rate was scaled.
_scaled: WeakRegistry[bool] = WeakRegistry()


class LearningRateScale(RankCallback):
    """Multiplies the optimizer's learning rate once, when training begins.

    This is the linear scaling rule: k times the global batch needs k times the rate.
    Write the rate for one process in the script, and let this callback scale it. A
    schedule is scaled as a whole. The rate of an optimizer is scaled only once, even
    over several calls of `fit`.

    A saved rate is already scaled. Therefore the rate of an optimizer that has taken
    steps (restored by `tfdist.restore`, `BackupAndRestore` or Keras, or trained without
    this callback) is left unchanged, and rank 0 logs this. A schedule is saved without
    the factor, so it is scaled again.

    Args:
        multiplier: factor of the rate, above 0. Default: the number of ranks that train
            the model, i.e. `tfdist.size()` or the size of the optimizer's process set.

    Raises:
        ValueError: `multiplier` is not above 0. At the start of `fit`: the model has no
            optimizer, or several that train with the gradients of all ranks.
        tfdist.MismatchError: at the start of `fit`: the ranks' multipliers differ.
        TypeError: at the start of `fit`: the rate is a function.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.LearningRateScale()]

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        section 2.1 (arXiv:1706.02677).
    """

    def __init__(self, multiplier: float | None = None) -> None:
        super().__init__()
        if multiplier is not None and not multiplier > 0:
            raise ValueError(f"Expected a multiplier above 0, got {multiplier}.")
        self.multiplier = multiplier

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the multiplier, because scaled schedules are not compared later."""
        own = self.multiplier
        return {"multiplier": None if own is None else float(own)}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Scales the rate, unless this optimizer's rate was scaled before."""
        super().on_train_begin(logs)
        optimizer = optimizer_of_one_rate(self.model, type(self).__name__)
        if optimizer in _scaled:
            _logger.info("The learning rate was already scaled and is not changed.")
            return
        rate = ScalableRate(optimizer)
        _scaled.set(optimizer, True)
        steps = int(optimizer._iterations)  # batches, if gradients are accumulated
        if steps and rate.is_saved:
            if runtime.rank() == self._first:
                _logger.warning(
                    "LearningRateScale: the optimizer has taken %d steps, so its "
                    "learning rate, %g, is assumed to be already scaled and is not "
                    "changed.",
                    steps,
                    rate.base,
                )
            return
        options = getattr(self.model.optimizer, "tfdist_options", None)
        is_adasum = options is not None and options.op == ReduceOp.ADASUM
        if is_adasum and self.multiplier is None and runtime.rank() == self._first:
            _logger.warning(
                "LearningRateScale multiplies the learning rate by the number of "
                "ranks, but op=tfdist.ReduceOp.ADASUM is meant for the unscaled rate "
                "of one process. Remove LearningRateScale."
            )
        rate.set(rate.get() * (self.multiplier or len(members_of(self._ranks))))
        if rate.needs_retrace:
            self.model.make_train_function(force=True)
