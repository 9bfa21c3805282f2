"""Consistency between ranks of layer state that is not in variables.

Keras's preprocessing layers hold what `adapt` has learnt, or the user has given them.
`Normalization` computes with tensors that it has once made of its variables, so it has
to make them anew when these are sent. `StringLookup`, `IntegerLookup` (and with them
`TextVectorization`) and `Discretization` have no variables at all: the ranks compare
what they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.collectives.objects import gather_from_all
from tfdist.core.process_sets import ProcessSet, members_of

# Of each kind of layer: what it holds, and how all ranks get that of one.
_ADVICE = {
    keras.layers.Normalization: (
        "mean and variance",
        "Send its variables and call layer.finalize_state() then, or give all ranks "
        "the same mean and variance.",
    ),
    keras.layers.Discretization: (
        "bin_boundaries",
        "Write layer.bin_boundaries = tfdist.broadcast_object(list("
        "layer.bin_boundaries)).",
    ),
    keras.layers.StringLookup: (
        "vocabulary",
        "Adapt it to the same data on all ranks, or give all ranks that of one: words "
        "= tfdist.broadcast_object([str(w) for w in layer.get_vocabulary()]); "
        "layer.set_vocabulary(words).",
    ),
    keras.layers.IntegerLookup: (
        "vocabulary",
        "Adapt it to the same data on all ranks, or give all ranks that of one: numbers"
        " = tfdist.broadcast_object([int(n) for n in layer.get_vocabulary()]); "
        "layer.set_vocabulary(numbers).",
    ),
}


def follow_variables(model: keras.layers.Layer) -> None:
    """To be called when variables of a model have got other values.

    Args:
        model: a model or layer.
    """
    for layer in _adapted_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def layer_fingerprints(model: keras.layers.Layer) -> list[list[str]]:
    """For each such layer of a model its name, its kind and a hash of what it holds."""
    return [
        [layer.name, _kind(layer).__name__, _print_of(layer)]
        for layer in _adapted_layers(model)
    ]


def check_alike(
    model: keras.layers.Layer, function: str, process_set: ProcessSet | None = None
) -> None:
    """Asks all ranks whether such layers hold the same.

    Args:
        model: a model or layer, with the same variables on all ranks.
        function: what the ranks have called, for messages.
        process_set: the ranks that take part, which alone call it; default all.

    Raises:
        tfdist.MismatchError: on all ranks: they do not, or a rank has joined.
    """
    told = gather_from_all(
        layer_fingerprints(model),
        function,
        name="comparison of preprocessing layers",
        process_set=process_set,
    )
    check_prints(told, function, members_of(process_set))


def check_prints(
    told: Sequence[list[list[str]]], function: str, ranks: Sequence[int]
) -> None:
    """Raises if `layer_fingerprints` are not those of the first rank.

    Raises:
        tfdist.MismatchError: names the layer and what to write.
    """
    for rank, prints in zip(ranks, told, strict=True):
        # Keras numbers the names, so they may differ.
        kinds, first_kinds = ([kind for _, kind, _ in p] for p in (prints, told[0]))
        pairs = zip(prints, told[0], strict=False)
        others = [own[:2] for own, first in pairs if own[1:] != first[1:]]
        if kinds == first_kinds and not others:
            continue
        where = f"The ranks differ in {function}: on rank {rank}"
        if kinds != first_kinds:
            names = [[name for name, *_ in some] for some in (prints, told[0])]
            raise errors.MismatchError(
                f"{where} the model has the preprocessing layers {names[0]}, and "
                f"{names[1]} on rank {ranks[0]}. Build the same model on all ranks."
            )
        name, kind = others[0]
        holds, advice = _ADVICE[getattr(keras.layers, kind)]
        raise errors.MismatchError(
            f"{where} the {kind} layer {name!r} holds another {holds} than on rank "
            f"{ranks[0]}: the same sample would be another input there. {advice}"
        )


def _adapted_layers(model: keras.layers.Layer) -> list[Any]:
    """Each once, in an order that is the same on all ranks."""
    kinds = tuple(_ADVICE)
    layers = (one for one in model._flatten_layers() if isinstance(one, kinds))
    return list({id(layer): layer for layer in layers}.values())


def _kind(layer: Any) -> type:
    return next(kind for kind in _ADVICE if isinstance(layer, kind))


def _print_of(layer: Any) -> str:
    """A cryptographic hash: equal only if what the layer holds is."""
    words: list[str] = []
    if isinstance(layer, keras.layers.Normalization):
        # None before it is built; of a trace, if it was built within one.
        is_known = layer.mean is not None and not tf.is_symbolic_tensor(layer.mean)
        numbers = [layer.mean, layer.variance] if is_known else []
    elif isinstance(layer, keras.layers.Discretization):
        numbers = [np.asarray(layer.bin_boundaries or [], np.float64)]
    else:
        weights = getattr(layer, "idf_weights_const", None)
        numbers = [] if weights is None else [weights]
        words = [str(one) for one in layer.get_vocabulary()]  # or NumPy's strings
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16)
    for array in numbers:
        digest.update(keras.ops.convert_to_numpy(array).tobytes())
    return digest.hexdigest()
