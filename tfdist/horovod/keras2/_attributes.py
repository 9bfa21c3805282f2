"""Attributes of Keras 2 layers, models, metrics and variables that Keras 3 lacks.

`__getattr__` provides the attributes, but only to the user's code. TensorFlow and Keras
test whether objects have some of them, and would behave differently if they found them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.util.object_identity import Reference

from tfdist.horovod.keras2 import _optimizer_methods
from tfdist.horovod.keras2._spelling import Patches, tell

_Get = Callable[[Any], Any]
# For each kind of object: attribute without a counterpart in Keras 3 → the advice.
_GONE = {
    "layer": {
        "compute_output_signature": "Write layer.compute_output_spec(inputs).",
        "get_input_mask_at": "Pass masks to layer.call(mask=...).",
        "get_output_mask_at": "Write layer.compute_mask(inputs, mask).",
        "input_mask": "Pass masks to layer.call(mask=...).",
        "output_mask": "Write layer.compute_mask(inputs, mask).",
    },
    "model": {
        "autotune_steps_per_execution": "Write compile(steps_per_execution=n).",
        "distribute_reduction_method": "Write hvd.DistributedOptimizer(op=...).",
        "get_weight_paths": "Write {v.path: v for v in model.weights}.",
        "save_spec": "Write model.input_shape and model.inputs.",
        "to_yaml": "Write model.to_json().",
    },
    "metric": {"merge_state": "Add up the variables of the metrics."},
    "optimizer": _optimizer_methods.GONE,
}


def install(patches: Patches) -> None:
    """Adds the attributes to Keras's classes."""
    of_layer = _refusing("layer") | _of_layers()
    of_model = of_layer | _refusing("model")
    of_model["reset_states"] = _method(_reset_states)
    of_metric = _refusing("metric") | {
        "non_trainable_weights": lambda metric: list(metric.variables),
        "trainable_weights": lambda metric: [],
    }
    for cls, answers in (
        (keras.layers.Layer, of_layer),
        (keras.Model, of_model),
        (keras.metrics.Metric, of_metric),
        (keras.Variable, _of_variables()),
        (keras.optimizers.Optimizer, _refusing("optimizer")),
    ):
        patches.put(cls, "__getattr__", _answering(answers))
    patches.wrap(keras.layers.RNN, "reset_states", _reset_to)
    patches.put(keras.metrics.Metric, "reset_states", _reset_metric)
    for cls in _with_subclasses(keras.metrics.Metric):
        if "reset_state" in vars(cls):
            patches.wrap(cls, "reset_state", _reset_by_old_name)


def _answering(answers: dict[str, _Get]) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        caller = sys._getframe(1).f_globals.get("__name__", "")
        get = answers.get(name)
        if get is None or caller.startswith(("keras.src.", "tensorflow.")):
            return object.__getattribute__(self, name)  # raises the original error
        return get(self)

    return __getattr__


def _refusing(kind: str) -> dict[str, _Get]:
    def refuse(name: str, advice: str, owner: Any) -> Any:
        raise AttributeError(f"{kind}.{name} does not exist in Keras 3. {advice}")

    return {
        name: functools.partial(refuse, name, advice)
        for name, advice in _GONE[kind].items()
    }


def _method(function: Callable[..., Any]) -> _Get:
    return lambda owner: functools.partial(function, owner)


# ---- layers and models


def _of_layers() -> dict[str, _Get]:
    found: dict[str, _Get] = {
        "add_update": _method(_add_update),
        "dynamic": lambda layer: False,
        "finalize_state": lambda layer: lambda: None,  # adapt() completes it
        "stateful": lambda layer: False,
        "updates": _no_updates,
        "state_updates": _no_updates,
        "inbound_nodes": functools.partial(_hidden, "inbound_nodes"),
        "outbound_nodes": functools.partial(_hidden, "outbound_nodes"),
    }
    for kind in ("input", "output"):
        tensors = functools.partial(_tensors, kind)
        shapes = functools.partial(_shapes, kind)
        found[f"get_{kind}_at"] = _method(tensors)
        found[f"get_{kind}_shape_at"] = _method(shapes)
        found[f"{kind}_shape"] = functools.partial(shapes, node_index=0)
    return found


def _tensors(kind: str, layer: Any, node_index: int) -> Any:
    tell(f"layer.get_{kind}_at(0)", f"layer.{kind}")
    return layer._get_node_attribute_at_index(node_index, f"{kind}_tensors", kind)


def _shapes(kind: str, layer: Any, node_index: int) -> Any:
    found = layer._get_node_attribute_at_index(node_index, f"{kind}_tensors", kind)
    tell(f"layer.{kind}_shape", f"layer.{kind}.shape")
    return keras.tree.map_structure(lambda one: tuple(one.shape), found)


def _no_updates(layer: Any) -> list[Any]:
    tell("layer.updates", "layers that assign to their variables in call()")
    return []


def _hidden(name: str, layer: Any) -> Any:
    tell(f"layer.{name}", f"layer._{name}")
    return getattr(layer, f"_{name}")


def _add_update(layer: Any, updates: Any) -> None:
    """Calls updates that are functions; all others have been applied already."""
    tell("layer.add_update(...)", "the assignments themselves, in call()")
    for one in updates if isinstance(updates, list | tuple) else [updates]:
        if callable(one):
            one()


def _reset_states(model: Any) -> None:
    tell("model.reset_states()", "layer.reset_state() for stateful layers")
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()


def _reset_to(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def reset_states(self: Any, states: Any = None) -> None:
        if states is None:
            original(self)
            return
        tell("layer.reset_states(states)", "v.assign(value) for layer.states")
        own, values = keras.tree.flatten(self.states), keras.tree.flatten(states)
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)

    return reset_states


# ---- metrics


def _with_subclasses(cls: Any) -> set[Any]:
    """Returns a Keras class and all subclasses of it that Keras defines."""
    of_keras = [c for c in cls.__subclasses__() if c.__module__.startswith("keras.")]
    return {cls}.union(*map(_with_subclasses, of_keras))


def _reset_metric(self: Any) -> None:
    tell("metric.reset_states()", "metric.reset_state()")
    if type(self).reset_states is _reset_metric:
        self.reset_state()
    else:  # the user's class defines reset_states(), which called super()
        keras.metrics.Metric.reset_state.__wrapped__(self)


def _reset_by_old_name(original: Callable[..., None]) -> Callable[..., None]:
    """Makes `reset_state` call the user's `reset_states`, if the class defines one."""

    @functools.wraps(original)
    def reset_state(self: Any) -> None:
        if type(self).reset_states is _reset_metric:
            original(self)
            return
        tell("def reset_states(self) of a metric", "def reset_state(self)")
        self.reset_states()

    return reset_state


# ---- variables


def _of_variables() -> dict[str, _Get]:
    """Returns a variable's old attributes, and the attributes of a `tf.Variable`."""
    names = [name for name in dir(ResourceVariable) if not name.startswith("_")]
    found: dict[str, _Get] = {n: functools.partial(_of_value, n) for n in names}
    return found | {
        "ref": _method(_ref),
        "experimental_ref": _method(_ref),
        "read_value": _method(_read_value),
    }


def _of_value(name: str, variable: Any) -> Any:
    tell(f"variable.{name}", f"variable.value.{name}")
    return getattr(variable.value, name)


def _ref(variable: Any) -> Any:
    """Returns a hashable reference to the variable, with `deref()`."""
    tell("variable.ref()", "id(variable)")
    return Reference(variable)


def _read_value(variable: Any) -> tf.Tensor:
    tell("variable.read_value()", "keras.ops.convert_to_tensor(variable)")
    return tf.convert_to_tensor(variable)
