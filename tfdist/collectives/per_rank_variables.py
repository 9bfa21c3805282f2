"""Distinguishes variables that may differ between ranks from those that must not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from tfdist.collectives.local_variables import identity
from tfdist.core.registry import WeakRegistry

# Keras's names for variables that depend on each rank's own batches.
_PER_RANK_NAMES = (
    "moving_mean",
    "moving_variance",
    "moving_stddev",
    "renorm_mean",
    "renorm_stddev",
    "seed_generator_state",
    "gradient_accumulator",
)
_MAX_LISTS = 64

# Variables passed as local_variables to a tape or optimizer → the prefix of their
# slots' names in Keras.
_declared: WeakRegistry[str] = WeakRegistry()
# Variables in which optimizers add up gradients of this rank until the next update.
_accumulators: WeakRegistry[bool] = WeakRegistry()
# Lists passed to broadcast_variables, by the identities of their variables.
_broadcast_lists: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}


def declare(variables: Iterable[Any]) -> None:
    """Records that `variables` are local to each rank (`local_variables`)."""
    for variable in variables:
        if not is_declared(variable):
            path = str(getattr(variable, "path", variable.name))
            prefix = path.replace("/", "_").replace(":", "_") + "_"
            _declared.set(tf_variable(variable), prefix)


def is_declared(variable: Any) -> bool:
    """Returns whether a variable has been passed to `declare`."""
    return tf_variable(variable) in _declared


def note_accumulators(variables: Iterable[Any]) -> None:
    """Records variables in which an optimizer adds up gradients of this rank."""
    for variable in variables:
        if variable is not None:
            _accumulators.set(tf_variable(variable), True)


def is_accumulator(variable: Any) -> bool:
    """Returns whether a variable has been passed to `note_accumulators`."""
    return tf_variable(variable) in _accumulators


def note_broadcast(variables: Sequence[Any]) -> None:
    """Records that `variables` were broadcast in one call, as the state of a model."""
    key = tuple(map(identity, variables))
    _broadcast_lists[key] = [weakref.ref(variable) for variable in variables]
    # Another thread may remove the same lists.
    for oldest in list(_broadcast_lists)[:-_MAX_LISTS]:
        _broadcast_lists.pop(oldest, None)


def were_broadcast(variables: Sequence[Any]) -> bool:
    """Returns whether any of `variables` was in a list passed to `note_broadcast`."""
    identities = set(map(identity, variables))
    return any(
        not identities.isdisjoint(map(identity, listed))
        for listed in _live_broadcast_lists()
    )


def broadcast_with(variables: Sequence[Any]) -> list[Any]:
    """Returns live variables that were broadcast in one list with any of `variables`.

    Excludes variables that Keras updates from each rank's own batches: moving
    statistics, gradient accumulators, states of metrics and of random number
    generators, and the slots of local variables.
    """
    identities = set(map(identity, variables))
    found: dict[int, Any] = {}
    for listed in _live_broadcast_lists():
        if identities.isdisjoint(map(identity, listed)):
            continue
        # Not all declared variables: those of a deleted model may live on some ranks.
        known = (_declared.get(tf_variable(v)) for v in [*variables, *listed])
        prefixes = tuple(prefix for prefix in known if prefix is not None)
        found.update(
            (identity(v), v) for v in listed if not _has_per_rank_name(v, prefixes)
        )
    return list(found.values())


def _live_broadcast_lists() -> Iterator[list[Any]]:
    """Yields the live variables of each list: a freed variable's id may be reused."""
    for references in list(_broadcast_lists.values()):
        alive = (reference() for reference in references)
        yield [variable for variable in alive if variable is not None]


def shared_weights(model: keras.Model) -> list[Any]:
    """Returns the weights of a model that must be equal on all ranks."""
    own = set(map(identity, per_rank_states(model)))
    return [v for v in model.weights if identity(v) not in own and not is_declared(v)]


def per_rank_states(model: keras.Model) -> list[Any]:
    """Returns non-trainable weights that by design depend on each rank's own batches.

    These are the moving statistics of batch normalization layers that are not
    synchronized over all ranks, and the states that a stateful recurrent layer carries
    to the next batch.
    """
    own: list[Any] = []
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            # Attributes of synchronized layers: the class of Keras, the process set.
            is_plain = not hasattr(layer, "_tfdist_own")
            if is_plain or layer._tfdist_set is not None:
                own += layer.non_trainable_variables
        elif getattr(layer, "stateful", False) is True:
            own += layer.non_trainable_variables
    return own


def _has_per_rank_name(variable: Any, slot_prefixes: tuple[str, ...]) -> bool:
    name = str(getattr(variable, "path", variable.name)).rpartition("/")[2]
    is_metric = getattr(variable, "aggregation", None) == "sum"
    is_slot = name.startswith(slot_prefixes)
    return is_metric or is_slot or name.partition(":")[0].endswith(_PER_RANK_NAMES)


def tf_variable(variable: Any) -> Any:
    """Returns a Keras variable's TensorFlow variable; other variables unchanged."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value
