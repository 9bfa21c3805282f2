"""Per-rank training state, which may differ while the weights are equal.

It consists of local variables with their slots, and of accumulated gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import grouped_allreduce
from tfdist.collectives.local_variables import identity
from tfdist.core import runtime
from tfdist.core.process_sets import members_of
from tfdist.gradients import accumulation
from tfdist.training.model_optimizers import optimizers_of, slots_of
from tfdist.training.optimizer_mixins import ReducesUpdates


def is_between_updates(optimizer: Any) -> bool:
    """Whether an optimizer has added up gradients of some batches of its next update.

    Args:
        optimizer: of Keras, a loss scale around one, or None.
    """
    inner = _inner(optimizer)
    batches = getattr(inner, "gradient_accumulation_steps", None)
    return batches is not None and _batches_of(inner) % int(batches) != 0


def own_variables(model: keras.Model) -> list[Any]:
    """The variables of a model and its optimizers that differ between the ranks.

    Moving statistics, which differ too, are not among them.
    """
    own: list[Any] = []
    for optimizer in optimizers_of(model):
        own += _accumulated(optimizer)
        own += _local(optimizer, model.non_trainable_variables)
    return own


def mark_of(model: keras.Model, shared: Iterable[Any]) -> str:
    """Where a training is, as a text that is equal on ranks that train together.

    Args:
        model: its optimizers count the batches.
        shared: variables; of these the weights that are trained are looked at.

    Returns:
        "" before the first batch.
    """
    counts = [_batches_of(_inner(one)) for one in optimizers_of(model)]
    if not any(counts):
        return ""
    digest = hashlib.blake2b(repr(counts).encode(), digest_size=16)
    for variable in shared:
        if variable.trainable:
            digest.update(keras.ops.convert_to_numpy(variable).tobytes())
    return digest.hexdigest()


def average_accumulated(model: keras.Model) -> None:
    """Gives all ranks the mean of the gradients that wait for their update.

    The update is made of their sum over the ranks, so it stays the same. If batches
    have weights it is also made of the sum of these, which are averaged likewise. All
    ranks call it, at the same batch.
    """
    for optimizer in optimizers_of(model):
        local = set(map(identity, _local(optimizer)))
        sums = [v for v in _accumulated(optimizer) if identity(v) not in local]
        if not sums:
            continue
        inner = _inner(optimizer)
        ranks = inner.tfdist_options.process_set
        if runtime.rank() not in members_of(ranks):
            continue
        sums += accumulation.totals(inner)
        values = [tf.convert_to_tensor(v) for v in sums]
        means = grouped_allreduce(
            values,
            name="mean of accumulated gradients before a save",
            process_set=ranks,
        )
        for variable, mean in zip(sums, means, strict=True):
            variable.assign(mean)


def _accumulated(optimizer: Any) -> list[Any]:
    """The sums of an optimizer that reduces them later, if there is something in them.

    Where gradients are reduced before they are added up, the sums are equal anyway.
    """
    inner = _inner(optimizer)
    if not (isinstance(inner, ReducesUpdates) and is_between_updates(inner)):
        return []
    return [v for v in inner._accumulated_gradients if v is not None]  # type: ignore[attr-defined]


def _local(optimizer: Any, others: Iterable[Any] = ()) -> list[Any]:
    """Returns the variables that an optimizer does not reduce, with their slots.

    Args:
        optimizer: of Keras, or of tfdist.
        others: variables that it does not train, as a layer has them.
    """
    options = getattr(optimizer, "tfdist_options", None)
    if options is None or options.local_variables is None:
        return []
    # Not all weights of the model: a function that is asked about its variables may
    # say yes to those of other optimizers.
    asked = [*_inner(optimizer)._trainable_variables, *others]
    local = [asked[place] for place in options.local_places(asked)]
    return [*local, *slots_of(optimizer, map(identity, local))]


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _batches_of(inner: Any) -> int:
    """How many batches an optimizer has seen; `iterations` counts its updates."""
    return int(keras.ops.convert_to_numpy(inner._iterations))
