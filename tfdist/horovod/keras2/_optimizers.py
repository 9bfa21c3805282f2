"""Keras 2 optimizers: constructor arguments, `lr`, `variables()`, module names."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdist.horovod._keras.variables import CallableList
from tfdist.horovod.keras2 import _decay, _optimizer_methods
from tfdist.horovod.keras2._decay import decayed, settable_rate
from tfdist.horovod.keras2._spelling import Patches, refuse, tell
from tfdist.training.optimizer_mixins import Reducing

# Arguments of Keras 2 that do not affect the results.
_WITHOUT_EFFECT = ("jit_compile", "is_legacy_optimizer")


def install(patches: Patches) -> None:
    """Patches Keras's optimizers."""
    base = keras.optimizers.Optimizer
    for cls in _classes(base):
        if "__init__" in vars(cls):
            patches.wrap(cls, "__init__", _constructor)
        if "build" in vars(cls):
            patches.wrap(cls, "build", _optimizer_methods.takes_var_list)
        if isinstance(vars(cls).get("variables"), property):
            patches.wrap(cls, "variables", _callable_variables)
        if "apply_gradients" in vars(cls):
            patches.wrap(cls, "apply_gradients", _apply_gradients)
    patches.wrap(Reducing, "apply_gradients", _apply_gradients)
    patches.put(base, "lr", property(_get_lr, _set_lr))
    patches.put(base, "weights", property(_weights))
    patches.put(base, "get_weights", _get_weights)
    patches.put(base, "set_weights", _set_weights)
    _decay.install(patches)
    _optimizer_methods.install(patches)
    _install_names(patches)


def _classes(base: type) -> Iterator[type]:
    """Yields `base`, its base classes and its subclasses, if from Keras or tfdist."""
    seen: set[type] = set()
    waiting = [c for c in base.__mro__ if c.__module__.startswith("keras.src.")]
    while waiting:
        cls = waiting.pop()
        if cls not in seen and cls.__module__.split(".")[0] in ("keras", "tfdist"):
            seen.add(cls)
            waiting += cls.__subclasses__()
            if issubclass(cls, base) or cls in base.__mro__:
                yield cls


def _constructor(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        name = type(self).__name__
        _optimizer_methods.check_class(type(self))
        if "lr" in kwargs:
            tell(f"{name}(lr=...)", f"{name}(learning_rate=...)")
            args, kwargs = _with_rate(original, args, kwargs)
        for dropped in _WITHOUT_EFFECT:
            if dropped in kwargs:
                tell(f"{name}({dropped}=...)", f"{name}(...) without it")
                del kwargs[dropped]
        if "epsilon" in kwargs and kwargs["epsilon"] is None:
            del kwargs["epsilon"]
        args, kwargs = _with_float_rate(args, kwargs)
        rate_decay = kwargs.pop("decay", None)
        if rate_decay:
            new = f"InverseTimeDecay(rate, 1, {float(rate_decay)!r})"
            tell(f"{name}(decay=...)", f"{name}(learning_rate={new})")
        original(self, *args, **kwargs)
        if rate_decay:
            self.learning_rate = decayed(self, float(rate_decay))

    return __init__


def _with_rate(constructor: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replaces the learning rate with `lr`, which takes precedence as in Keras 2.

    User-defined classes rely on this: they pass a default rate together with the
    user's `**kwargs`, which may contain `lr`.
    """
    rate = kwargs.pop("lr")
    parameters = list(inspect.signature(constructor).parameters)
    if args and parameters[1:2] == ["learning_rate"]:
        return (rate, *args[1:]), kwargs
    return args, {**kwargs, "learning_rate": rate}


def _with_float_rate(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Converts the rate to float, as Keras 3 rejects integers and NumPy scalars."""

    def as_float(value: Any) -> Any:
        is_array = hasattr(value, "dtype") and hasattr(value, "shape")
        is_number = isinstance(value, numbers.Number) or is_array
        scalar = is_number and getattr(value, "shape", ()) == ()
        if isinstance(value, bool | float) or not scalar or hasattr(value, "assign"):
            return value
        return float(value)

    if "learning_rate" in kwargs:
        return args, {**kwargs, "learning_rate": as_float(kwargs["learning_rate"])}
    return (as_float(args[0]), *args[1:]) if args else args, kwargs


def _callable_variables(original: property) -> property:
    def variables(self: Any) -> CallableList:
        return CallableList(original.fget(self), _told_variables)  # type: ignore[misc]

    return property(variables)


def _told_variables() -> None:
    tell("optimizer.variables()", "optimizer.variables")


def _apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_gradients(
        self: Any, grads_and_vars: Any, *args: Any, **named: Any
    ) -> Any:
        if args or "name" in named:
            tell("apply_gradients(pairs, name=...)", "apply_gradients(pairs)")
            args, named = (), {k: v for k, v in named.items() if k != "name"}
        for old in ("experimental_aggregate_gradients", "skip_gradients_aggregation"):
            if old in named:
                _check_aggregates(self, old, named.pop(old))
        return original(self, grads_and_vars, **named)

    return apply_gradients


def _check_aggregates(optimizer: Any, old: str, value: Any) -> None:
    """Raises if the argument shows that the gradients would be reduced twice."""
    reduces = hasattr(optimizer, "tfdist_options")
    if reduces and bool(value) == old.startswith("skip"):
        raise refuse(
            f"apply_gradients({old}={value!r}) on an optimizer of "
            "hvd.DistributedOptimizer",
            "It would reduce the gradients again: use the optimizer without "
            "hvd.DistributedOptimizer, with gradients of hvd.DistributedGradientTape.",
        )
    tell(f"apply_gradients({old}=...)", "apply_gradients(pairs)")


def _get_lr(self: Any) -> Any:
    tell("optimizer.lr", "optimizer.learning_rate")
    return settable_rate(self)


def _set_lr(self: Any, value: Any) -> None:
    tell("optimizer.lr", "optimizer.learning_rate")
    rate = settable_rate(self)
    if hasattr(rate, "assign") and not callable(value):
        rate.assign(value)
    else:
        self.learning_rate = value


def _weights(self: Any) -> list[Any]:
    tell("optimizer.weights", "optimizer.variables")
    return list(self.variables)


def _get_weights(self: Any) -> list[Any]:
    tell("optimizer.get_weights()", "[v.numpy() for v in optimizer.variables]")
    return [keras.ops.convert_to_numpy(v) for v in self.variables]


def _set_weights(self: Any, weights: Any) -> None:
    tell("optimizer.set_weights(values)", "v.assign(value) for optimizer.variables")
    given, variables = list(weights), list(self.variables)
    shapes = [np.shape(value) for value in given]
    expected = [tuple(v.shape) for v in variables]
    if shapes != expected:
        raise ValueError(
            f"Expected {len(expected)} values for the variables of {self.name!r}, with "
            f"the shapes {expected}, got {len(shapes)} with {shapes}. Build the "
            "optimizer first, with optimizer.build(model.trainable_variables)."
        )
    for variable, value in zip(variables, given, strict=True):
        variable.assign(value)


def _install_names(patches: Patches) -> None:
    """Adds modules `legacy` and `experimental`, which return the current optimizers."""
    from keras import optimizers

    for module in _faces_of(optimizers):
        for part in ("legacy", "experimental"):
            stand_in = types.ModuleType(f"{module.__name__}.{part}")
            stand_in.__getattr__ = _current(part)  # type: ignore[method-assign]
            stand_in.__path__ = []
            patches.put(module, part, stand_in)
            patches.put(sys.modules, stand_in.__name__, stand_in)


def _faces_of(optimizers: types.ModuleType) -> list[types.ModuleType]:
    """Returns the two modules `keras.optimizers` and `tf.keras.optimizers`."""
    from keras._tf_keras.keras import optimizers as of_tf_keras

    return [optimizers, of_tf_keras]


def _current(part: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:  # noqa: N807
        current = vars(keras.optimizers).get(name)
        if not isinstance(current, type):
            raise AttributeError(
                f"keras.optimizers.{part}.{name}: Keras 3 has no optimizer {name!r}. "
                "keras.optimizers lists the available optimizers."
            )
        tell(f"keras.optimizers.{part}.{name}", f"keras.optimizers.{name}")
        return current

    return __getattr__
