"""Handles training state that may differ between ranks with equal weights.

This state consists of local variables with their slots, of accumulated gradients, and
of the slots of optimizers that use Adasum.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import grouped_allreduce
from tfdist.collectives.local_variables import identity
from tfdist.collectives.objects import gather_from_all
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.gradients import accumulation
from tfdist.training.adasum import own_slots
from tfdist.training.model_optimizers import optimizers_of, slots_of
from tfdist.training.optimizer_mixins import ReducesUpdates

_logger = logging.getLogger("tfdist")


def is_between_updates(optimizer: Any) -> bool:
    """Returns whether an optimizer has accumulated gradients for its next update.

    Args:
        optimizer: a Keras optimizer, a loss scale around one, or None.
    """
    inner = _inner(optimizer)
    batches = getattr(inner, "gradient_accumulation_steps", None)
    return batches is not None and _batches_of(inner) % int(batches) != 0


def own_variables(model: keras.Model) -> list[Any]:
    """Returns the variables of a model and its optimizers that differ between ranks.

    Moving statistics, which also differ, are not included.
    """
    own: list[Any] = []
    for optimizer in optimizers_of(model):
        own += _accumulated(optimizer)
        own += _local(optimizer, model.non_trainable_variables)
        own += own_slots(optimizer)
    return own


def broadcast_at_start(
    model: keras.Model,
    variables: list[Any],
    root: int,
    process_set: ProcessSet | None,
    callback: str,
) -> None:
    """Gives all ranks the state of `root`; all ranks call it at the start of `fit`.

    If all ranks continue the same training, each keeps the state that may differ.

    Args:
        model: the model in `fit`.
        variables: the variables to send.
        root: the rank whose state is sent.
        process_set: the ranks that train; None for all.
        callback: name of the callback, for messages.
    """
    own = set(map(identity, own_variables(model)))
    shared = [v for v in variables if identity(v) not in own]
    mark = _mark_of(model, shared) if own else ""
    all_go_on = _all_go_on(mark, root, process_set, callback)
    sent = shared if all_go_on else variables
    broadcast_variables(sent, root, process_set=process_set)


def _all_go_on(
    mark: str, root: int, process_set: ProcessSet | None, callback: str
) -> bool:
    """Returns whether all ranks continue the same training and keep their state."""
    told = gather_from_all(mark, callback, name=callback, process_set=process_set)
    if not all(told):
        return False
    if len(set(told)) > 1 and runtime.rank() == root:
        _logger.warning(
            "The ranks begin fit with different weights or step counts. All ranks use "
            "the state of rank %d, including local variables and accumulated "
            "gradients.",
            root,
        )
    return len(set(told)) == 1


def _mark_of(model: keras.Model, shared: Iterable[Any]) -> str:
    """Returns a fingerprint of batch counts and trainable weights, to compare ranks.

    Args:
        model: the model, whose optimizers count the batches.
        shared: variables, of which the fingerprint includes the trainable ones.

    Returns:
        The fingerprint; "" before the first batch.
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
    """Averages the accumulated gradients over the ranks.

    The next update uses their sum over the ranks, which is unchanged. The accumulated
    weights of batches, if any, are also averaged. All ranks call it at the same batch.
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
    """Returns the accumulators that an optimizer will reduce, if they are not empty.

    If gradients are reduced before they are accumulated, the accumulators are equal on
    all ranks.
    """
    inner = _inner(optimizer)
    if not (isinstance(inner, ReducesUpdates) and is_between_updates(inner)):
        return []
    return [v for v in inner._accumulated_gradients if v is not None]  # type: ignore[attr-defined]


def _local(optimizer: Any, others: Iterable[Any] = ()) -> list[Any]:
    """Returns the variables that an optimizer does not reduce, with their slots.

    Args:
        optimizer: a Keras optimizer, wrapped or not.
        others: variables of layers that the optimizer does not train.
    """
    options = getattr(optimizer, "tfdist_options", None)
    if options is None or options.local_variables is None:
        return []
    # Not all weights of the model: a `local_variables` function may also return True
    # for variables of other optimizers.
    asked = [*_inner(optimizer)._trainable_variables, *others]
    local = [asked[place] for place in options.local_places(asked)]
    return [*local, *slots_of(optimizer, map(identity, local))]


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _batches_of(inner: Any) -> int:
    """Returns the number of batches of an optimizer; `iterations` counts updates."""
    return int(keras.ops.convert_to_numpy(inner._iterations))
