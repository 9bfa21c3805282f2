"""Attributes and methods that Keras 3 lacks: of layers, models, metrics, variables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.util.object_identity import Reference

from tfdist.horovod.keras2._spelling import Patches, tell

# What a layer or model lacks → what to do without it.
_LAYER = {
    "compute_output_signature": "Write layer.compute_output_spec(inputs).",
    "get_input_mask_at": "Pass masks to layer.call(mask=...).",
    "get_output_mask_at": "Write layer.compute_mask(inputs, mask).",
    "input_mask": "Pass masks to layer.call(mask=...).",
    "output_mask": "Write layer.compute_mask(inputs, mask).",
}
_MODEL = {
    "autotune_steps_per_execution": "Write compile(steps_per_execution=n).",
    "distribute_reduction_method": "Write hvd.DistributedOptimizer(op=...).",
    "get_weight_paths": "Write {v.path: v for v in model.weights}.",
    "save_spec": "Write model.input_shape and model.inputs.",
    "to_yaml": "Write model.to_json().",
}
_METRIC = {"merge_state": "Add up the variables of the metrics."}
# Methods of a `tf.Variable` that a Keras variable leaves to its value.
_OF_VALUE = sorted(
    name
    for name in dir(ResourceVariable)
    if not name.startswith("_") and not hasattr(keras.Variable, name)
)


def install(patches: Patches) -> None:
    """Adds the attributes."""
    layer, model = keras.layers.Layer, keras.Model
    for cls, table in (
        (layer, _LAYER),
        (model, _MODEL),
        (keras.metrics.Metric, _METRIC),
    ):
        for name, advice in table.items():
            patches.put(cls, name, _refusing(cls.__name__.lower(), name, advice))
    for kind in ("input", "output"):
        tensors = _tensors_of(kind)
        patches.put(layer, f"get_{kind}_at", _method(f"get_{kind}_at", kind, tensors))
        name = f"get_{kind}_shape_at"
        patches.put(layer, name, _method(name, f"{kind}.shape", _shapes_of(tensors)))
        name = f"{kind}_shape"
        patches.put(layer, name, _Attribute(_first_shape(name, tensors)))
    patches.put(layer, "add_update", _add_update)
    patches.put(layer, "add_variable", _renamed("layer.add_variable", "add_weight"))
    patches.put(layer, "finalize_state", _nothing("layer.finalize_state()"))
    for name in ("updates", "state_updates"):
        patches.put(layer, name, _Attribute(_none_of(f"layer.{name}")))
    for name in ("inbound_nodes", "outbound_nodes"):
        patches.put(layer, name, _Attribute(_hidden(name)))
    patches.put(layer, "dynamic", False)
    patches.put(layer, "stateful", False)
    patches.put(model, "reset_states", _reset_states)
    patches.wrap(keras.layers.RNN, "reset_states", _reset_to)
    patches.put(
        keras.metrics.Metric,
        "reset_states",
        _renamed("metric.reset_states", "reset_state"),
    )
    weights = _Attribute(lambda self: list(self.variables))
    patches.put(keras.metrics.Metric, "non_trainable_weights", weights)
    patches.put(keras.metrics.Metric, "trainable_weights", _Attribute(lambda _: []))
    patches.put(keras.Variable, "ref", _ref)
    patches.put(keras.Variable, "experimental_ref", _ref)
    patches.put(keras.Variable, "read_value", _read_value)
    for name in _OF_VALUE:
        if name not in vars(keras.Variable):
            patches.put(keras.Variable, name, property(_of_value(name)))


class _Attribute:
    """An attribute that a user's class may set, and that Keras itself does not see."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __get__(self, owner: Any, cls: type) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if owner is None or caller.startswith("keras.src."):
            raise AttributeError("not an attribute of Keras 3")
        return self._get(owner)


def _first_shape(name: str, tensors: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    def get(layer: Any) -> Any:
        shapes = _shapes_of(tensors)(layer, 0)
        tell(f"layer.{name}", f"layer.{name.replace('_', '.')}")
        return shapes

    return get


def _tensors_of(kind: str) -> Callable[[Any, int], Any]:
    def tensors(layer: Any, node_index: int) -> Any:
        return layer._get_node_attribute_at_index(node_index, f"{kind}_tensors", kind)

    return tensors


def _shapes_of(tensors: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def shapes(layer: Any, node_index: int) -> Any:
        found = tensors(layer, node_index)
        return keras.tree.map_structure(lambda one: tuple(one.shape), found)

    return shapes


def _method(name: str, new: str, find: Callable[[Any, int], Any]) -> Callable[..., Any]:
    def method(self: Any, node_index: int) -> Any:
        tell(f"layer.{name}(0)", f"layer.{new}")
        return find(self, node_index)

    method.__name__ = name
    return method


def _refusing(kind: str, name: str, advice: str) -> _Attribute:
    def get(self: Any) -> Any:
        raise AttributeError(f"{kind}.{name} is not there in Keras 3. {advice}")

    return _Attribute(get)


def _renamed(old: str, new: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        tell(f"{old}()", f"{old.partition('.')[0]}.{new}()")
        return getattr(self, new)(*args, **named)

    return method


def _nothing(old: str) -> Callable[[Any], None]:
    def method(self: Any) -> None:
        tell(old, "nothing: adapt() completes it")

    return method


def _none_of(old: str) -> Callable[[Any], list[Any]]:
    def get(self: Any) -> list[Any]:
        tell(old, "nothing: layers update their variables in call()")
        return []

    return get


def _hidden(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        tell(f"layer.{name}", f"layer._{name}")
        return getattr(self, f"_{name}")

    return get


def _add_update(self: Any, updates: Any) -> None:
    """Calls those that are functions; others have been done already."""
    tell("layer.add_update(...)", "the assignments themselves, in call()")
    for one in updates if isinstance(updates, list | tuple) else [updates]:
        if callable(one):
            one()


def _reset_states(self: Any) -> None:
    tell("model.reset_states()", "layer.reset_state() for stateful layers")
    for layer in self._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()


def _reset_to(original: Callable[..., None]) -> Callable[..., None]:
    def reset_states(self: Any, states: Any = None) -> None:
        if states is None:
            original(self)
            return
        tell("layer.reset_states(states)", "v.assign(value) for layer.states")
        own, values = keras.tree.flatten(self.states), keras.tree.flatten(states)
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)

    return reset_states


def _ref(self: Any) -> Any:
    """Equal for the same variable alone; its `deref()` is the variable."""
    tell("variable.ref()", "id(variable)")
    return Reference(self)


def _read_value(self: Any) -> tf.Tensor:
    tell("variable.read_value()", "keras.ops.convert_to_tensor(variable)")
    return tf.convert_to_tensor(self)


def _of_value(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        tell(f"variable.{name}", f"variable.value.{name}")
        return getattr(self.value, name)

    return get
