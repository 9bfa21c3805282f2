"""Batch normalisation over the batches of all ranks.

A synchronised layer is Keras's layer, except that mean and variance are those of the
batches of all ranks. Its class has the name of Keras's class: a saved model names the
plain `keras.layers.BatchNormalization` and loads without tfdist.
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
# Call contexts of Keras whose variables are in `synchronized_by`.
_contexts_seen: WeakRegistry[bool] = WeakRegistry()


class _Synchronized:
    """Mixin before a batch normalisation's own class."""

    # Of the layer's own class.
    axis: int
    gamma: Any
    beta: Any

    # Class attributes, so that a copy made by from_config() is synchronised likewise.
    _tfdist_own: type
    _tfdist_set: ProcessSet | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # Keras then leaves XLA off, where it may choose

    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of a batch; Keras calls it in training only."""
        for variable in self._weighted_too_late():
            synchronized_by.set(variable, weakref.ref(self))
        slack = 0.0
        if mask is not None:
            mask = tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs))
            mask = tf.cast(mask, tf.bool)
            slack = keras.config.epsilon()  # what Keras adds to the count
        return synchronized_moments(
            inputs,
            self.axis % len(inputs.shape),
            mask=mask,
            slack=slack,
            process_set=id_of(self._tfdist_set),
        )

    def _weighted_too_late(self) -> list[Any]:
        """Returns variables whose gradients cannot be weighted after the backward pass.

        These are the variables of all layers before this one too, so all of the model
        are returned, once for each call of the model.
        """
        own = [v for v in (self.gamma, self.beta) if v is not None]
        context = global_state.get_global_attribute("current_call_ctx")
        if context is None or context in _contexts_seen:
            return own
        _contexts_seen.set(context, True)  # once for all layers of a model
        return [*own, *context.entry_layer.trainable_variables]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which gives the plain class.
        rebuild: Any
        rebuild, arguments = tuple(self.__reduce__())[:2]
        copied = rebuild(*arguments)
        _convert(copied, self._tfdist_set)
        return copied


def SyncBatchNormalization(  # noqa: N802 - named like the class it stands for
    *, process_set: ProcessSet | None = None, **kwargs: Any
) -> keras.layers.BatchNormalization:
    """A `keras.layers.BatchNormalization` over the batches of all ranks.

    In training it takes the mean and variance of all ranks' batches together, each
    value counted once, also where the batches differ in size or a rank's is empty. So
    outputs, gradients and moving statistics are those of one process with the
    concatenated batch, and the moving statistics are equal on all ranks. In inference
    it is Keras's layer.

    Gradients go through the reduction: they are those of the sum of all ranks' losses,
    as of every operation here. `DistributedOptimizer` and `DistributedGradientTape`
    then average them. With batches of equal size that is the gradient of the mean loss
    of the concatenated batch; with others, give this rank's number of samples to
    `DistributedGradientTape.gradient(..., weight=...)`. (The `weight` of an optimizer
    comes too late, after the backward pass, and is refused for all variables of the
    model.)

    All ranks have to call the layer, forward and backward, equally often and in the
    same order. Each call in training costs one operation forward, in which every rank
    sends `2 C + 1` numbers to every other (`3 C` with a mask), and one allreduce of
    `2 C` numbers backward, for `C` channels. Statistics are float32 for half types.

    Args:
        process_set: the ranks whose batches are normalised together, this one among
            them; default all.
        **kwargs: of `keras.layers.BatchNormalization`, but `synchronized`, which is for
            `tf.distribute`.

    Returns:
        The layer, of a class that is named `BatchNormalization`.

    Raises:
        TypeError: Keras's layer does not take an argument, or `synchronized` is given.
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
        by Reducing Internal Covariate Shift", ICML 2015, algorithm 1. Over the batches
        of several devices: C. Peng et al., "MegDet: A Large Mini-Batch Object
        Detector", CVPR 2018, section 3.3.
    """
    if "synchronized" in kwargs:
        raise TypeError(
            "SyncBatchNormalization takes no argument 'synchronized': in Keras it "
            "means tf.distribute, and this layer always synchronises over tfdist's "
            "ranks. Leave it out."
        )
    _check_member(process_set)
    own = keras.layers.BatchNormalization
    return _synchronized_class(own, process_set)(**kwargs)


def synchronize_batch_normalization(
    model: _Layer, *, process_set: ProcessSet | None = None
) -> _Layer:
    """Makes the batch normalisation layers of a model take all ranks' batches.

    The layers stay the same objects, with their weights and names: only their class
    becomes that of `SyncBatchNormalization`. So a model that is built, or trained, or
    made by `keras.applications`, can be converted, and nested models with it. Do it
    before `fit`; after `keras.models.load_model`, which gives plain layers, do it
    again. Layers that the model makes only later, in `build`, are not converted: build
    it first. Frozen layers take no statistics from batches, so nothing changes there.

    Args:
        model: a model or layer; changed in place.
        process_set: the ranks whose batches are normalised together, this one among
            them; default all. Layers that were converted before get this one.

    Returns:
        The same model or layer. `is_synchronized` tells which of its layers take the
        statistics of all ranks.

    Raises:
        TypeError: `model` is no Keras layer, or one of its batch normalisations has a
            `call` or `_moments` of its own; nothing is converted.
        ValueError: it has no batch normalisation, or this rank is not in `process_set`.

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
            f"The model {model.name!r} has no BatchNormalization layer. If it makes "
            "its layers in build(), call model.build(input_shape) first."
        )
    for layer in found:
        _check_convertible(layer)
    for layer in found:
        _convert(layer, process_set)
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            part.train_function = None  # it has been traced with the plain layers
    return model


def is_synchronized(layer: Any) -> bool:
    """Whether a layer takes the statistics of all ranks' batches."""
    return isinstance(layer, _Synchronized)


def batch_normalizations(
    model: keras.layers.Layer,
) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalisation layers of a model, each once, in order."""
    layers = model._flatten_layers()
    unique = {
        id(layer): layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
    }
    return list(unique.values())


def _check_member(process_set: ProcessSet | None) -> None:
    id_of(process_set)  # one that has ended is refused here
    if process_set is not None:
        process_set.rank()  # refuses a rank that is not in it


def _check_convertible(layer: Any) -> None:
    own = layer._tfdist_own if is_synchronized(layer) else type(layer)
    plain = keras.layers.BatchNormalization
    for method in ("call", "_moments"):
        if getattr(own, method) is not getattr(plain, method):
            raise TypeError(
                f"Cannot synchronise the layer {layer.name!r}: expected Keras's own "
                f"BatchNormalization, got {own.__name__}, which overrides {method}(), "
                "so its statistics may be other ones. Convert the other layers one by "
                "one: synchronize_batch_normalization(layer)."
            )


def _convert(layer: Any, process_set: ProcessSet | None) -> None:
    own: Any = layer._tfdist_own if is_synchronized(layer) else type(layer)
    layer.__class__ = _synchronized_class(own, process_set)
    layer.supports_jit = False


@functools.cache
def _synchronized_class(own: Any, process_set: ProcessSet | None) -> Any:
    """Returns the synchronised subclass of a layer's class, with the class's name."""
    attributes = {"_tfdist_own": own, "_tfdist_set": process_set}
    return subclass_under_own_name(own, _Synchronized, keras.layers, attributes)
