"""The loss scale that `DistributedOptimizer` adds under the policy `mixed_float16`.

`model.compile` adds a loss scale, which the steps of Keras apply to the loss; an
optimizer in a custom training loop has none. When the optimizer is wrapped, its use is
not yet known. The added scale therefore takes effect with the first `scale_loss`, which
every step with a scaled loss calls before it computes gradients.

References:
    Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.training.optimizer_mixins import Reducing

_logger = logging.getLogger("tfdist")
# Optimizers that get gradients of scaled losses.
_scaling: WeakRegistry[bool] = WeakRegistry()
# Optimizers for which the warning about unscaled gradients was printed.
_warned: WeakRegistry[bool] = WeakRegistry()
_called_scale_loss: weakref.WeakSet[Any] = weakref.WeakSet()


def note_scaled(optimizer: Any) -> None:
    """Records that an optimizer will get gradients of scaled losses from now on.

    Args:
        optimizer: any optimizer; only optimizers with an added scale use the record.
    """
    _scaling.set(optimizer, True)


def _another_scales() -> bool:
    """Returns whether scale_loss was called on an optimizer that is still in use."""
    if _called_scale_loss:
        gc.collect()  # Keras models are in reference cycles
    return bool(_called_scale_loss)


class _CountsWhenUsed:
    """Mixin that unscales gradients only if `scale_loss` has been called.

    In the class hierarchy it comes directly before `LossScaleOptimizer`, and it gets
    reduced gradients.
    """

    # Defined by the optimizer's own class.
    name: str
    built: bool
    inner_optimizer: Any

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the current scale."""
        note_scaled(self)
        _called_scale_loss.add(self)
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates the variables; unscales the gradients if `scale_loss` was called.

        Raises:
            ValueError: `scale_loss` was called on a different optimizer.
        """
        if self in _scaling:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        if _another_scales():
            raise ValueError(
                f"{self.inner_optimizer.name!r} got gradients, but the loss was scaled "
                "by a different optimizer or not at all. Call scale_loss of this "
                "optimizer on the loss from which its gradients are computed. If "
                "several optimizers use one scaled loss, wrap "
                "keras.optimizers.LossScaleOptimizer(optimizer) for each of them; it "
                "always unscales."
            )
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)  # type: ignore[attr-defined]
        self._warn_unscaled()
        return self.inner_optimizer.apply(grads, trainable_variables)

    def _warn_unscaled(self) -> None:
        if self not in _warned and runtime.rank() == 0:
            _logger.warning(
                "The gradients of %r are used unchanged, because scale_loss was not "
                "called. In mixed_float16, small gradients of an unscaled loss become "
                "zeros. Add loss = optimizer.scale_loss(loss) inside the tape; the "
                "optimizer unscales the gradients.",
                self.inner_optimizer.name,
            )
        _warned.set(self, True)


class ReducingWithAddedScale(Reducing, _CountsWhenUsed):
    """Mixin for a `LossScaleOptimizer` that `DistributedOptimizer` has added."""
