"""Explains a difference between ranks: the variable, and the likely cause.

The functions are pure and give the same result on every rank, so all ranks raise the
same message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

# Kinds of variables, in the order in which the message lists them.
TRAINED, STATE, SLOT = "trained", "state", "slot"
_NOUNS = {
    TRAINED: "the trainable weight",
    STATE: "the non-trainable weight",
    SLOT: "the optimizer variable",
}
SETTING = "TFDIST_WEIGHT_CHECK"


@dataclasses.dataclass(frozen=True)
class RankState:
    """The state of the training on one rank, which is sent to the other ranks.

    Attributes:
        rank: the rank.
        names: paths of the variables that are compared.
        kinds: for each variable TRAINED, STATE or SLOT.
        fingerprints: for each variable the hash of its value.
        were_broadcast: whether `broadcast_variables` or `BroadcastInitialState` has
            already sent the values of one rank to all ranks.
        decisions: plain values on which callbacks base decisions, by name, e.g.
            {"EarlyStopping.best": 0.25}.
        monitors: for each callback in `decisions`, the key of the logs that the
            callback monitors.
    """

    rank: int
    names: Sequence[str]
    kinds: Sequence[str]
    fingerprints: Sequence[int]
    were_broadcast: bool = False
    decisions: dict[str, Any] = dataclasses.field(default_factory=dict)
    monitors: dict[str, str] = dataclasses.field(default_factory=dict)


def explain(states: Sequence[RankState], when: str, *, is_first: bool) -> str:
    """Returns the message for ranks whose states differ.

    Args:
        states: states of all compared ranks; at least two, not all equal.
        when: time of the comparison, e.g. "at the end of epoch 1".
        is_first: whether this is the first comparison, so that the ranks may have
            started with different values.

    Returns:
        Several sentences: the difference and its ranks, the likely cause, and a remedy.

    Example:
        >>> states = [RankState(rank, ["dense/kernel"], [TRAINED], [rank])
        ...           for rank in range(2)]
        >>> explain(states, "after the first step", is_first=True).split(":")[0]
        'The ranks differ after the first step'
    """
    first = states[0]
    for other in states[1:]:
        if list(other.names) != list(first.names):
            found = _different_lists(first, other)
        elif list(other.fingerprints) != list(first.fingerprints):
            found = _different_values(states, first, other, is_first=is_first)
        elif text_of(other.decisions) != text_of(first.decisions):
            found = _different_decisions(first, other)
        else:
            continue
        return f"The ranks differ {when}: {found}"
    raise ValueError("Expected states that differ, got equal ones.")


def _different_lists(first: RankState, other: RankState) -> str:
    for name, other_name in zip(first.names, other.names, strict=False):
        if name != other_name:
            difference = (
                f"the weight {name!r} on rank {first.rank} is {other_name!r} on rank "
                f"{other.rank}"
            )
            break
    else:
        difference = (
            f"there are {len(first.names)} variables on rank {first.rank} and "
            f"{len(other.names)} on rank {other.rank}"
        )
    return (
        f"{difference}. Build the same model on all ranks. (Keras numbers the names of "
        "layers: if only the numbers differ, call keras.utils.clear_session() on "
        "all ranks before the model is created.)"
    )


def _different_values(
    states: Sequence[RankState], first: RankState, other: RankState, *, is_first: bool
) -> str:
    different = [
        index
        for index, number in enumerate(first.fingerprints)
        if any(state.fingerprints[index] != number for state in states)
    ]
    kinds = [first.kinds[index] for index in different]
    # Choose the kind nearest to the cause: states change weights, and weights change
    # slots.
    leading = next(kind for kind in (STATE, TRAINED, SLOT) if kind in kinds)
    started_apart = is_first and not first.were_broadcast
    if started_apart and TRAINED in kinds:
        leading = TRAINED
    index = next(p for p in different if first.kinds[p] == leading)
    differing = next(
        s for s in states if s.fingerprints[index] != first.fingerprints[index]
    )
    noun = _NOUNS[leading]
    return (
        f"{noun} {first.names[index]!r} has different values on rank {first.rank} and "
        f"rank {differing.rank} ({_counts(first, kinds)}). "
        f"{_cause(first, index, kinds, started_apart=started_apart)} If a variable is "
        "meant to differ between ranks, list it in local_variables=[...] of the "
        "DistributedOptimizer or DistributedGradientTape. (Set the environment "
        f"variable {SETTING}=warn to get a warning instead of this error.)"
    )


def _differ_mostly(first: RankState, kinds: Sequence[str]) -> bool:
    """Returns whether more than half of the trained weights differ."""
    trained = list(first.kinds).count(TRAINED)
    return list(kinds).count(TRAINED) > trained / 2


def _counts(first: RankState, kinds: Sequence[str]) -> str:
    nouns = {TRAINED: "trainable", STATE: "non-trainable", SLOT: "optimizer"}
    parts = []
    for kind, noun in nouns.items():
        total = list(first.kinds).count(kind)
        if total:
            parts.append(f"{list(kinds).count(kind)} of {total} {noun}")
    return f"{', '.join(parts)} variables differ"


def _cause(
    first: RankState, index: int, kinds: Sequence[str], *, started_apart: bool
) -> str:
    name, kind = first.names[index], first.kinds[index]
    layer = name.rpartition("/")[0] or name
    if started_apart:
        return (
            "The ranks probably started with different weights: put "
            "tfdist.callbacks.BroadcastInitialState() into the callbacks of fit, or "
            "call tfdist.broadcast_variables(model.weights) on all ranks before the "
            "first step."
        )
    if kind == STATE:
        return (
            f"The layer {layer!r} probably updates it from each rank's own batches. "
            "Average the value over the ranks before assigning it: value = "
            "tfdist.allreduce(value)."
        )
    if kind == SLOT:
        return (
            "The optimizer was probably restored, built or changed on only some of the "
            "ranks. Send its state to all: tfdist.broadcast_variables("
            "optimizer.variables)."
        )
    if not _differ_mostly(first, kinds):
        return (
            f"The layer {layer!r}, or a callback, probably sets it on each rank "
            "separately, for example from the rank's first batch. Send the values of "
            "one rank to all ranks afterwards, with tfdist.broadcast_variables([...]), "
            "or average them before they are assigned, with tfdist.allreduce(value)."
        )
    return (
        "A callback or the training step probably changed the weights on only some of "
        "the ranks, or updated them with gradients that were not reduced. Callbacks "
        "have to decide on values that are equal on all ranks."
    )


def _different_decisions(first: RankState, other: RankState) -> str:
    key = next(
        key
        for key in sorted({*first.decisions, *other.decisions})
        if text_of(first.decisions.get(key)) != text_of(other.decisions.get(key))
    )
    callback, _, attribute = key.partition(".")
    monitor = other.monitors.get(callback) or first.monitors.get(callback)
    looks_at = f"It monitors {monitor!r}," if monitor else "It depends on a value"
    return (
        f"{callback} has {attribute}={first.decisions.get(key)!r} on rank "
        f"{first.rank} and {attribute}={other.decisions.get(key)!r} on rank "
        f"{other.rank}, so it could act on one rank and not on the other. {looks_at} "
        "which differs between ranks or is missing on some. It was probably added to "
        "the logs by a callback that runs after MetricAverage. Run that callback on "
        "every rank (not wrapped in RankZeroOnly) and list it before "
        "tfdist.callbacks.MetricAverage, or average the value yourself: logs[name] = "
        "float(tfdist.allreduce(value))."
    )


def text_of(value: Any) -> str:
    """Returns a text that is the same for plain values that are equal; NaN equals NaN.

    Example:
        >>> from tfdist.collectives.consistency.explanation import text_of
        >>> text_of({"best": 1.0, "wait": -0.0}), text_of({"wait": False, "best": 1})
        ("{'best': 1, 'wait': 0}", "{'best': 1, 'wait': 0}")
    """
    if isinstance(value, dict):
        items = sorted((text_of(key), text_of(one)) for key, one in value.items())
        return "{" + ", ".join(f"{key}: {one}" for key, one in items) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return repr(int(value) if value.is_integer() else float(value))
    return repr(value)
