"""`LossScaleOptimizer` in custom training loops, as in Keras 2.

In Keras 2, `apply_gradients` expects gradients that `get_unscaled_gradients` has
unscaled; in Keras 3 it expects scaled gradients. Therefore, once
`get_unscaled_gradients` has been called, `apply` scales the gradients again. The scale
is a power of two, so scaling and unscaling do not round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod.keras2._spelling import Patches, tell
from tfdist.training.loss_scale import note_scaled

_UNSCALED = "_keras2_takes_unscaled"  # attribute: the loop unscales the gradients
_EARLY = "_keras2_scale_made"  # attribute: the scale variable exists before `build`


def install(patches: Patches) -> None:
    """Changes `LossScaleOptimizer`."""
    cls = keras.optimizers.LossScaleOptimizer
    patches.put(cls, "get_scaled_loss", _get_scaled_loss)
    patches.put(cls, "get_unscaled_gradients", _get_unscaled_gradients)
    patches.put(cls, "loss_scale", property(_loss_scale))
    patches.wrap(cls, "scale_loss", _scale_loss)
    patches.wrap(cls, "apply", _apply)
    patches.wrap(cls, "build", _build)


def _get_scaled_loss(self: Any, loss: Any) -> Any:
    """Returns the loss multiplied by the scale of this step."""
    tell("optimizer.get_scaled_loss(loss)", "optimizer.scale_loss(loss)")
    note_scaled(self)
    if callable(loss):
        return lambda: _combined(tf.math.multiply, loss(), _scale_of(self))
    return _combined(tf.math.multiply, loss, _scale_of(self))


def _get_unscaled_gradients(self: Any, grads: Any) -> list[Any]:
    """Returns the gradients divided by the scale of this step; None stays None."""
    tell(
        "optimizer.get_unscaled_gradients(gradients)",
        "optimizer.apply_gradients(...) with the scaled gradients, which it unscales",
    )
    vars(self)[_UNSCALED] = True
    note_scaled(self)
    # Divides, because the inverse of the scale may be too small for a float32.
    scale = _scale_of(self)
    return [_combined(tf.math.divide, g, scale) for g in grads]


def _loss_scale(self: Any) -> Any:
    tell("optimizer.loss_scale", "optimizer.dynamic_scale")
    return _scale_of(self)


def _scale_of(optimizer: Any) -> Any:
    """Returns the scale variable; creates it if needed, so traced steps can read it."""
    if not optimizer.built and not hasattr(optimizer, "dynamic_scale"):
        with tf.init_scope():
            optimizer.step_counter = optimizer.add_variable(
                shape=(), dtype="int", initializer="zeros", name="step_counter"
            )
            optimizer.dynamic_scale = optimizer.add_variable(
                shape=(),
                dtype="float32",
                initializer=keras.initializers.Constant(optimizer.initial_scale),
                name="dynamic_scale",
            )
        vars(optimizer)[_EARLY] = True
    return optimizer.dynamic_scale


def _build(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def build(self: Any, var_list: Any) -> None:
        if not vars(self).get(_EARLY):
            original(self, var_list)
            return
        self.inner_optimizer.build(var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    return build


def _scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        vars(self)[_UNSCALED] = False  # as in Keras 3: apply expects scaled gradients
        return original(self, loss)

    return scale_loss


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if vars(self).get(_UNSCALED):
            scale = _scale_of(self)
            grads = [_combined(tf.math.multiply, g, scale) for g in grads]
        return original(self, grads, trainable_variables)

    return apply


def _combined(operation: Callable[[Any, Any], Any], value: Any, scale: Any) -> Any:
    """Applies `operation` to `value` (or slices) and `scale`, in the value's dtype."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        values = _combined(operation, value.values, scale)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    tensor = tf.convert_to_tensor(value)
    return operation(tensor, tf.cast(scale, tensor.dtype))
