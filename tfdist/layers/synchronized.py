"""Batch normalization over the batches of all ranks.

A synchronized layer is a Keras layer whose mean and variance are computed over the
batches of all ranks. Its class has the same name as the Keras class, so a saved model
contains the plain `keras.layers.BatchNormalization` and loads without tfdist.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.core.keras_subclass import subclass_under_own_name
from tfdist.core.process_sets import ProcessSet, id_of
from tfdist.core.registry import WeakRegistry
from tfdist.gradients.sample_weights import synchronized_by
from tfdist.layers._moments import synchronized_moments

_Layer = TypeVar("_Layer", bound=keras.layers.Layer)
# Keras call contexts whose variables were already added to `synchronized_by`.
_contexts_seen: WeakRegistry[bool] = WeakRegistry()


class _Synchronized:
    """Mixin that makes a batch normalization layer use the statistics of all ranks."""

    # Defined by the layer's own class, which follows this class in the MRO.
    axis: int
    gamma: Any
    beta: Any

    # Class attributes, so that a copy from from_config() is synchronized as well.
    _tfdist_own: type
    _tfdist_set: ProcessSet | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # jit_compile="auto" then means no XLA

    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of a batch; called by Keras in training only."""
        for variable in self._weighted_too_late():
            synchronized_by.set(variable, weakref.ref(self))
        slack = 0.0
        if mask is not None:
            mask = tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs))
            mask = tf.cast(mask, tf.bool)
            slack = keras.config.epsilon()  # Keras adds this to the count
        return synchronized_moments(
            inputs,
            self.axis % len(inputs.shape),
            mask=mask,
            slack=slack,
            process_set=id_of(self._tfdist_set),
        )

    def _weighted_too_late(self) -> list[Any]:
        """Returns variables whose gradients cannot be weighted after the backward pass.

        The gradients of all earlier layers have passed through this layer. So the first
        synchronized layer in a call of the model returns all trainable variables of the
        model, and the other synchronized layers return only their own.
        """
        own = [v for v in (self.gamma, self.beta) if v is not None]
        context = global_state.get_global_attribute("current_call_ctx")
        if context is None or context in _contexts_seen:
            return own
        _contexts_seen.set(context, True)  # once for all layers of a model
        return [*own, *context.entry_layer.trainable_variables]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which returns the plain class.
        rebuild: Any
        rebuild, arguments = tuple(self.__reduce__())[:2]
        copied = rebuild(*arguments)
        _convert(copied, self._tfdist_set)
        return copied


def SyncBatchNormalization(  # noqa: N802 - named like the class it stands for
    *, process_set: ProcessSet | None = None, **kwargs: Any
) -> keras.layers.BatchNormalization:
    """Creates a batch normalization layer that uses the batches of all ranks.

    In training, the layer uses the mean and variance over the batches of all ranks. All
    values have equal weight, even if batch sizes differ or a rank's batch is empty.
    Outputs, gradients and moving statistics therefore match those of one process with
    the concatenated batch, and moving statistics are equal on all ranks. In inference
    the layer behaves like `keras.layers.BatchNormalization`.

    Gradients pass through the reduction. As for all operations of tfdist, they are
    gradients of the sum of all ranks' losses. `DistributedOptimizer` and
    `DistributedGradientTape` then average them. With equal batch sizes, the result is
    the gradient of the mean loss over the concatenated batch. With different batch
    sizes, pass this rank's number of samples to
    `DistributedGradientTape.gradient(..., weight=...)`. The `weight` of an optimizer
    would be applied too late, after the backward pass, so it raises an error for all
    variables of the model. It is also too late, but not detected, for the variables of
    a model whose outputs are passed to this one.

    All ranks have to call the layer, forward and backward, equally often and in the
    same order. With `C` channels, each training call costs one operation in the forward
    pass, in which every rank sends `2 C + 1` numbers to every other rank (`3 C` with a
    mask), and one allreduce of `2 C` numbers in the backward pass. For float16 and
    bfloat16, statistics are computed in float32.

    Args:
        process_set: the ranks whose batches are normalized together, including this
            rank; default: all ranks.
        **kwargs: arguments of `keras.layers.BatchNormalization`, except `synchronized`,
            which is for `tf.distribute`.

    Returns:
        The layer. Its class is named `BatchNormalization`.

    Raises:
        TypeError: the Keras layer does not accept an argument, or `synchronized` is
            given.
        ValueError: this rank is not in `process_set`, or an argument is out of range.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> layer = tfdist.layers.SyncBatchNormalization(momentum=0.5, center=False)
        >>> y = layer(tf.constant([[1.0], [3.0]]), training=True)
        >>> layer.moving_mean.numpy().tolist()  # half of the batch's mean
        [1.0]

    References:
        S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training
        by Reducing Internal Covariate Shift", ICML 2015, algorithm 1.

        C. Peng et al., "MegDet: A Large Mini-Batch Object Detector", CVPR 2018, section
        3.3 (batch normalization over several devices).
    """
    if "synchronized" in kwargs:
        raise TypeError(
            "SyncBatchNormalization does not accept 'synchronized'. In Keras this "
            "argument is for tf.distribute, whereas this layer always synchronizes "
            "over tfdist's ranks. Remove the argument."
        )
    _check_member(process_set)
    own = keras.layers.BatchNormalization
    return _synchronized_class(own, process_set)(**kwargs)


def synchronize_batch_normalization(
    model: _Layer, *, process_set: ProcessSet | None = None
) -> _Layer:
    """Converts the batch normalization layers of a model to synchronized layers.

    The layer objects, their weights and their names do not change; only their class is
    replaced, see `SyncBatchNormalization`. Models that are already built or trained,
    models from `keras.applications`, and nested models can be converted. Convert a
    model before `fit`, and again after `keras.models.load_model`, which returns plain
    layers. If a model creates layers in `build`, build it first: layers created after
    the conversion are not converted. Frozen layers do not use batch statistics, so
    their results do not change.

    Args:
        model: a model or layer; changed in place.
        process_set: the ranks whose batches are normalized together, including this
            rank; default: all ranks. Layers that were converted earlier also get this
            process set.

    Returns:
        `model` itself. `is_synchronized` returns whether a layer is synchronized.

    Raises:
        TypeError: `model` is not a Keras layer, or one of its batch normalization
            layers overrides `call` or `_moments`. No layer is converted.
        ValueError: `model` has no batch normalization layer, or this rank is not in
            `process_set`.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3),
        ...                           keras.layers.BatchNormalization()])
        >>> model = tfdist.layers.synchronize_batch_normalization(model)
        >>> [tfdist.layers.is_synchronized(layer) for layer in model.layers]
        [False, True]
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"Expected a Keras model or layer, got {type(model).__name__}: {model!r}."
        )
    _check_member(process_set)
    found = batch_normalizations(model)
    if not found:
        raise ValueError(
            f"The model {model.name!r} has no BatchNormalization layer. If it creates "
            "its layers in build(), call model.build(input_shape) first."
        )
    for layer in found:
        _check_convertible(layer)
    for layer in found:
        _convert(layer, process_set)
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            part.train_function = None  # was traced with the plain layers
    return model


def is_synchronized(layer: Any) -> bool:
    """Returns whether a layer uses the statistics of all ranks' batches."""
    return isinstance(layer, _Synchronized)


def batch_normalizations(
    model: keras.layers.Layer,
) -> list[keras.layers.BatchNormalization]:
    """Returns a model's batch normalization layers, in order and without duplicates."""
    layers = model._flatten_layers()
    unique = {
        id(layer): layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
    }
    return list(unique.values())


def uses_renorm(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether a layer has `renorm=True`, which Keras 3.14 and later have."""
    return getattr(layer, "renorm", False)


def _check_member(process_set: ProcessSet | None) -> None:
    id_of(process_set)  # raises if the set has been removed
    if process_set is not None:
        process_set.rank()  # raises if this rank is not in the set


def _check_convertible(layer: Any) -> None:
    own = layer._tfdist_own if is_synchronized(layer) else type(layer)
    plain = keras.layers.BatchNormalization
    for method in ("call", "_moments"):
        if getattr(own, method) is not getattr(plain, method):
            raise TypeError(
                f"Cannot synchronize the layer {layer.name!r}. Expected Keras's own "
                f"BatchNormalization, got {own.__name__}, which overrides {method}() "
                "and may compute different statistics. Convert the other layers one "
                "by one with synchronize_batch_normalization(layer)."
            )


def _convert(layer: Any, process_set: ProcessSet | None) -> None:
    own: Any = layer._tfdist_own if is_synchronized(layer) else type(layer)
    layer.__class__ = _synchronized_class(own, process_set)
    layer.supports_jit = False


@functools.cache
def _synchronized_class(own: Any, process_set: ProcessSet | None) -> Any:
    """Returns the synchronized subclass of `own`, which has the same name as `own`."""
    attributes = {"_tfdist_own": own, "_tfdist_set": process_set}
    return subclass_under_own_name(own, _Synchronized, keras.layers, attributes)
