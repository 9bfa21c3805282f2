"""Keras 2 methods of optimizers: `minimize`, and the methods of custom classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod.keras2._removed_arguments import Renamed, translated
from tfdist.horovod.keras2._spelling import Patches, refuse, tell

# Methods of Keras 2 optimizer subclasses that Keras 3 never calls.
_OLD_METHODS = (
    *("_resource_apply_dense", "_resource_apply_sparse", "_create_slots"),
    *("_resource_apply_sparse_duplicate_indices", "_prepare_local", "get_updates"),
)
_SLOTS = "Slots are in optimizer.variables, each with its path."
_TAPE = (
    "Take gradients with a tf.GradientTape (hvd.DistributedGradientTape) and write "
    "optimizer.apply_gradients(zip(gradients, variables))."
)
_BUILD = "Write self.add_variable_from_reference(v, name) in build(self, variables)."
_HYPER = (
    "Keep the number as an attribute; update_step gets the learning rate as an "
    "argument."
)
# Attributes that an optimizer lacks → the advice.
GONE = {
    "add_slot": _BUILD,
    "add_weight": "Write self.add_variable(shape, name=...).",
    "aggregate_gradients": "hvd.DistributedOptimizer reduces in apply_gradients.",
    "get_slot": _SLOTS,
    "get_slot_names": _SLOTS,
    "_build_learning_rate": "Pass learning_rate to super().__init__().",
    "_get_hyper": _HYPER,
    "_set_hyper": _HYPER,
}
BUILD = {"var_list": Renamed("variables")}
_REFERENCE = {
    "model_variable": Renamed("reference_variable"),
    "variable_name": Renamed("name"),
    "initial_value": Renamed("initializer"),
}


def install(patches: Patches) -> None:
    """Patches the base class of Keras's optimizers."""
    base = keras.optimizers.Optimizer
    patches.put(base, "minimize", _minimize)
    patches.put(base, "compute_gradients", _compute_gradients)
    for name in ("get_gradients", "get_updates"):
        patches.put(base, name, _no_symbolic_gradients(name))
    owner = next(c for c in base.__mro__ if "add_variable_from_reference" in vars(c))
    patches.wrap(owner, "add_variable_from_reference", _from_reference)


def check_class(cls: type) -> None:
    """Raises NotImplementedError for a custom class that is written for Keras 2."""
    for one in cls.__mro__:
        if one.__module__.split(".")[0] in ("keras", "tfdist", "builtins"):
            continue
        old = [name for name in _OLD_METHODS if name in vars(one)]
        step = vars(one).get("update_step")
        if step is not None and len(inspect.signature(step).parameters) == 3:
            old = ["update_step(gradient, variable)"]
        if old:
            raise refuse(
                f"An optimizer with {', '.join(old)} ({one.__qualname__})",
                "Call super().__init__(learning_rate=..., name=...). Define "
                "build(self, variables), which calls "
                "self.add_variable_from_reference(v, name) for each variable v, and "
                "update_step(self, gradient, variable, learning_rate).",
            )


def _minimize(
    self: Any,
    loss: Any,
    var_list: Any,
    grad_loss: Any = None,
    name: str | None = None,
    tape: Any = None,
) -> Any:
    """Computes and applies gradients; a distributed optimizer reduces them."""
    tell(
        "optimizer.minimize(loss, variables)",
        "optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))",
    )
    del name
    pairs = _gradients(loss, var_list, tape, grad_loss, self.scale_loss)
    return self.apply_gradients(pairs)


def _compute_gradients(
    self: Any, loss: Any, var_list: Any, tape: Any = None
) -> list[Any]:
    """Returns (gradient, variable) pairs; the gradients are not reduced."""
    tell("optimizer.compute_gradients(loss, variables)", "tape.gradient(...)")
    return _gradients(loss, var_list, tape, None, lambda value: value)


def _gradients(
    loss: Any,
    var_list: Any,
    tape: Any,
    grad_loss: Any,
    scale: Callable[[Any], Any],
) -> list[Any]:
    if not callable(loss) and tape is None:
        raise ValueError("tape is required when a tensor is passed as loss.")
    # The tape must record the scaling of the loss.
    with tf.GradientTape() if tape is None else tape as seen:
        if callable(loss):
            loss = loss()
        loss = scale(loss)
    variables = keras.tree.flatten(var_list() if callable(var_list) else var_list)
    grads = seen.gradient(loss, variables, output_gradients=grad_loss)
    return list(zip(grads, variables, strict=True))


def takes_var_list(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `build`, whose parameter `variables` is called `var_list` in Keras 2."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **translated("build", BUILD, named))

    return build


def _from_reference(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_variable_from_reference(self: Any, *args: Any, **named: Any) -> Any:
        if named.get("shape", 0) is None:
            del named["shape"]  # the variable's shape is used
        label = "add_variable_from_reference"
        return original(self, *args, **translated(label, _REFERENCE, named))

    return add_variable_from_reference


def _no_symbolic_gradients(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        raise refuse(f"optimizer.{name}(loss, params)", _TAPE)

    method.__name__ = name
    return method
