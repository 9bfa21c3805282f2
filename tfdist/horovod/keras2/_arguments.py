"""Accepts Keras 2 arguments of layers, losses, callbacks and functions in Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod.keras2 import _removed_arguments
from tfdist.horovod.keras2._names import modules_of
from tfdist.horovod.keras2._spelling import Patches, refuse, tell

_BATCH_SIZE = "_keras2_batch_size"  # attribute: batch size given to a layer
_WEIGHTS = "_keras2_weights"  # attribute: initial weights of a layer
# Order of the arguments of `add_weight` of layers and of metrics in Keras 2.
_OF_LAYER = ("name", "shape", "dtype", "initializer", "regularizer", "trainable")
_OF_METRIC = ("name", "shape", "aggregation", "synchronization", "initializer", "dtype")
# Arguments of `tf.Variable` that a Keras variable does not have.
_OUT = "add_weight(...) without it"
_OF_VARIABLE: dict[str, _removed_arguments.Dropped | _removed_arguments.Renamed] = {
    "caching_device": _removed_arguments.Dropped(_OUT, None),
    "collections": _removed_arguments.Dropped(_OUT, None),
    "synchronization": _removed_arguments.Dropped(_OUT, None),
    "use_resource": _removed_arguments.Dropped(_OUT, None),
    "getter": _removed_arguments.Dropped(_OUT, (None,)),
    "partitioner": _removed_arguments.Dropped(_OUT, (None,)),
    "experimental_autocast": _removed_arguments.Renamed("autocast"),
}
_OF_METRIC_STATE = {
    **_OF_VARIABLE,
    "aggregation": _removed_arguments.Dropped(_OUT, None),
}


def install(patches: Patches) -> None:
    """Patches constructors and functions of Keras."""
    patches.wrap(keras.layers.Layer, "__init__", _layer)
    patches.wrap(keras.layers.Layer, "add_weight", _add_weight(_OF_LAYER))
    patches.wrap(keras.metrics.Metric, "add_weight", _add_weight(_OF_METRIC))
    patches.wrap(keras.layers.Layer, "add_loss", _add_loss)
    patches.put(keras.layers.Layer, "_post_build", _set_first_weights)
    patches.wrap(keras.Sequential, "add", _add)
    patches.wrap(keras.losses.Loss, "__init__", _loss)
    for path, table in _removed_arguments.CALLABLES.items():
        where, _, name = path.rpartition(".")
        module, _, cls = where.rpartition(".")
        if cls[:1].isupper():
            kind = getattr(modules_of(module)[0], cls)
            _wrap_method(patches, kind, name, f"{cls}.{name}", table)
            continue
        for one in modules_of(where):
            target = vars(one).get(name)
            if isinstance(target, type):
                _wrap_method(patches, target, "__init__", name, table)
            elif target is not None:
                patches.put(one, name, _translating(target, name, table))


def _wrap_method(
    patches: Patches, cls: type, name: str, label: str, table: dict[str, Any]
) -> None:
    owner = next(one for one in cls.__mro__ if name in vars(one))
    patches.wrap(owner, name, lambda method: _translating(method, label, table))


def _translating(
    original: Callable[..., Any], label: str, table: dict[str, Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        return original(*args, **_removed_arguments.translated(label, table, named))

    return call


def _layer(original: Callable[..., None]) -> Callable[..., None]:
    # The parameters keep Keras's names, because Keras builds configurations from them.
    @functools.wraps(original)
    def __init__(self: Any, **kwargs: Any) -> None:  # noqa: N807
        label = type(self).__name__
        kwargs = _removed_arguments.translated(label, _removed_arguments.LAYER, kwargs)
        shape = kwargs.pop("batch_input_shape", None)
        batch_size = kwargs.pop("batch_size", None)
        weights = kwargs.pop("weights", None)
        if shape is not None:
            tell(f"{label}(batch_input_shape=...)", "keras.Input(batch_shape=...)")
            batch_size, kwargs["input_shape"] = shape[0], tuple(shape[1:])
        original(self, **kwargs)
        if batch_size is not None:
            vars(self)[_BATCH_SIZE] = batch_size
        if weights is not None:
            tell(f"{label}(weights=...)", "layer.set_weights(...) when it is built")
            vars(self)[_WEIGHTS] = weights

    return __init__


def _set_first_weights(self: Any) -> None:
    """Sets a layer's initial weights; called by Keras when the layer has been built."""
    weights = vars(self).pop(_WEIGHTS, None)
    if weights is not None:
        self.set_weights(weights)


def _add(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add(self: Any, layer: Any, *args: Any, **named: Any) -> None:
        size = getattr(layer, _BATCH_SIZE, None)
        if size is not None and not self._layers:
            shape = layer._input_shape_arg
            original(self, keras.layers.InputLayer(shape=shape, batch_size=size))
        original(self, layer, *args, **named)

    return add


def _add_weight(order: tuple[str, ...]) -> Callable[..., Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_weight(self: Any, *args: Any, **named: Any) -> Any:
            if args and isinstance(args[0], str):
                tell("add_weight('name', ...)", "add_weight(name='name', ...)")
                args, named = (), {**dict(zip(order, args, strict=False)), **named}
            if isinstance(named.get("aggregation"), tf.VariableAggregation):
                named["aggregation"] = named["aggregation"].name.lower()
            table = _OF_METRIC_STATE if order is _OF_METRIC else _OF_VARIABLE
            named = _removed_arguments.translated("add_weight", table, named)
            return original(self, *args, **named)

        return add_weight

    return make


def _add_loss(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_loss(self: Any, *args: Any, **named: Any) -> None:
        if "losses" in named:
            tell("add_loss(losses=...)", "add_loss(loss)")
            named["loss"] = named.pop("losses")
        named.pop("inputs", None)  # has had no effect since Keras 2.3
        loss = args[0] if args else named.get("loss")
        if callable(loss):
            raise refuse(
                "add_loss(function)", "Write add_loss(function()) in a layer's call()."
            )
        original(self, *args, **named)

    return add_loss


def _loss(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807
        new = "sum_over_batch_size"
        if args and args[0] in ("auto", "none", "sum", new):  # Keras 2: reduction first
            tell("Loss(reduction, name)", "Loss(reduction=reduction, name=name)")
            old = dict(zip(("reduction", "name"), args, strict=False))
            args, named = (), {**old, **named}
        if named.get("reduction") == "auto":
            tell("Loss(reduction='auto')", f"Loss(reduction={new!r})")
            named["reduction"] = new
        original(self, *args, **named)

    return __init__
