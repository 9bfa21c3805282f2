"""Finds the optimizers of a model, including those of a custom `train_step`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import keras

from tfdist.collectives.local_variables import identity, is_variable
from tfdist.collectives.objects import broadcast_object
from tfdist.core.process_sets import ProcessSet
from tfdist.training.optimizer import is_distributed


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the model's optimizer, and optimizers that a `train_step` may use.

    Optimizers that a custom `train_step` may use are attributes of the model, or
    members of attributes that are lists or dicts. They are in the order of assignment,
    which is equal on ranks that run the same program.
    """
    held: list[Any] = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        held += members_of_attribute(value)
    kind = keras.optimizers.Optimizer
    by_id = {id(one): one for one in held if isinstance(one, kind)}
    return list(by_id.values())


def updates_of(model: keras.Model) -> int | None:
    """Returns the number of updates of the first optimizer that trains a model.

    The default optimizer of `compile`, which a custom `train_step` may not use, counts
    only if it has been used, or if the model has no other optimizer.

    Returns:
        The number; None if the model has no optimizer.
    """
    optimizers = optimizers_of(model)
    used = [one for one in optimizers if not _is_default(one)] or optimizers
    return int(keras.ops.convert_to_numpy(used[0].iterations)) if used else None


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers inside a `LossScaleOptimizer` or a `MultiOptimizer`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    inside = [] if inner is None else [inner, *parts_of(inner)]
    return [*inside, *getattr(optimizer, "_inner_optimizers", ())]


def members_of_attribute(value: Any) -> list[Any]:
    """Returns the members of a list, tuple or dict, or a list of the value itself."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def slots_of(optimizer: Any, identities: Iterable[int]) -> list[Any]:
    """Returns the slots of a built Keras optimizer for some of its variables.

    Slots are kept in lists with one member per trained variable.

    Args:
        optimizer: a Keras optimizer, a `LossScaleOptimizer` or a `MultiOptimizer`.
        identities: identities of the variables, see `local_variables.identity`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    wanted = set(identities)
    found: list[Any] = []
    for one in [inner, *getattr(inner, "_inner_optimizers", ())]:
        trained = one._trainable_variables
        places = [i for i, v in enumerate(trained) if identity(v) in wanted]
        # Some lists hold the trained variables themselves, which are not slots.
        no_slots = set(map(identity, trained))
        for value in vars(one).values():
            if not isinstance(value, list | tuple) or len(value) != len(trained):
                continue
            if all(v is None or is_variable(v) for v in value):
                slots = [value[i] for i in places if value[i] is not None]
                found += [v for v in slots if identity(v) not in no_slots]
    return found


def build_alike(model: keras.Model, root: int, process_set: ProcessSet | None) -> None:
    """Builds optimizers that are built on rank `root`, for the same variables.

    An optimizer is built in its first step, so on a rank without steps it is unbuilt.
    All ranks of the process set have to call this function.

    Args:
        model: the model in `fit`.
        root: the rank that has taken every step.
        process_set: the ranks that train; None for all.
    """
    optimizers = optimizers_of(model)
    weights = model.weights
    places = {id(variable): place for place, variable in enumerate(weights)}
    own: list[list[int]] = []
    for one in optimizers:
        # In Keras 3.11, those of a LossScaleOptimizer are only in its inner optimizer.
        trained = getattr(one, "inner_optimizer", one)._trainable_variables
        own.append([places.get(id(v), -1) for v in trained] if one.built else [])
    told = broadcast_object(
        own, root, name="build of the optimizers", process_set=process_set
    )
    for optimizer, listed in zip(optimizers, told, strict=True):
        if optimizer.built or -1 in listed:  # -1: reported by a later check
            continue
        if listed:
            optimizer.build([weights[place] for place in listed])


def check_all_reduce(model: keras.Model) -> None:
    """Raises if only some of a model's optimizers reduce their gradients.

    The variables of other optimizers would diverge between ranks. If no optimizer is
    wrapped, a tape may reduce the gradients, which is checked after the first step.
    Optimizers inside another optimizer are ignored, and so is the default optimizer of
    `compile`, which a custom `train_step` may not use.

    Raises:
        ValueError: an optimizer does not reduce. The message contains the optimizers
            and the code to use.
    """
    found = optimizers_of(model)
    parts = {id(part) for one in found for part in parts_of(one)}
    if _is_default(model.optimizer):
        parts.add(id(model.optimizer))
    used = [one for one in found if id(one) not in parts]
    plain = [one for one in used if not is_distributed(one)]
    if plain and len(plain) < len(used):
        names = ", ".join(
            f"{_place_of(one, model)} ({type(one).__name__} {one.name!r})"
            for one in plain
        )
        raise ValueError(
            f"Of the model's {len(used)} optimizers, {names} does not reduce "
            "gradients, so its variables would differ between ranks. Wrap each "
            "optimizer with tfdist.DistributedOptimizer(...). Or use a "
            "tfdist.DistributedGradientTape for all gradients, and wrap no optimizer. "
            "For variables that should differ between ranks, wrap their optimizer with "
            "local_variables=lambda variable: True."
        )


def _is_default(optimizer: Any) -> bool:
    """Returns whether this may be the unused default optimizer of `compile`."""
    signature = inspect.signature(keras.Model.compile)
    default = keras.optimizers.get(signature.parameters["optimizer"].default)
    if type(optimizer) is not type(default):
        return False
    numbered = {"name": optimizer.name}
    made_alike = optimizer.get_config() == {**default.get_config(), **numbered}
    return made_alike and int(optimizer.iterations) == 0


def _place_of(optimizer: Any, model: keras.Model) -> str:
    for name, value in vars(model).items():
        if value is optimizer:
            return name.removeprefix("_")
    return "one in a list or dict"
