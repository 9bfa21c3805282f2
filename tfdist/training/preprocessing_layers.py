"""Checks that preprocessing layers have the same state on all ranks.

Keras's preprocessing layers hold state from `adapt` or from the user. `Normalization`
computes with tensors derived from its variables, which have to be recreated after the
variables were broadcast. `StringLookup`, `IntegerLookup` (and `TextVectorization`,
which contains one) and `Discretization` have no variables; their state is compared
between ranks.
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

# For each kind of layer: its state, and advice on how to make the state equal.
_ADVICE = {
    keras.layers.Normalization: (
        "mean and variance",
        "Broadcast its variables and then call layer.finalize_state(), or use the "
        "same mean and variance on all ranks.",
    ),
    keras.layers.Discretization: (
        "bin_boundaries",
        "Use layer.bin_boundaries = tfdist.broadcast_object(list("
        "layer.bin_boundaries)).",
    ),
    keras.layers.StringLookup: (
        "vocabulary",
        "Adapt it to the same data on all ranks, or broadcast the vocabulary: words "
        "= tfdist.broadcast_object([str(w) for w in layer.get_vocabulary()]); "
        "layer.set_vocabulary(words).",
    ),
    keras.layers.IntegerLookup: (
        "vocabulary",
        "Adapt it to the same data on all ranks, or broadcast the vocabulary: numbers"
        " = tfdist.broadcast_object([int(n) for n in layer.get_vocabulary()]); "
        "layer.set_vocabulary(numbers).",
    ),
}


def follow_variables(model: keras.layers.Layer) -> None:
    """Updates the state that layers derive from variables, after these were assigned.

    Args:
        model: a model or layer.
    """
    for layer in _adapted_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def layer_fingerprints(model: keras.layers.Layer) -> list[list[str]]:
    """Returns name, kind and a hash of the state of each preprocessing layer."""
    return [
        [layer.name, _kind(layer).__name__, _print_of(layer)]
        for layer in _adapted_layers(model)
    ]


def check_alike(
    model: keras.layers.Layer, function: str, process_set: ProcessSet | None = None
) -> None:
    """Checks that the preprocessing layers of all ranks have the same state.

    Args:
        model: a model or layer, with the same variables on all ranks.
        function: name of the function that the ranks called, for messages.
        process_set: the ranks that take part; only these ranks call the function;
            default all.

    Raises:
        tfdist.MismatchError: the states differ, or a rank has joined. All ranks raise
            it.
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
    """Raises if the `layer_fingerprints` of a rank differ from those of the first rank.

    Raises:
        tfdist.MismatchError: the message names the layer and the code to use.
    """
    for rank, prints in zip(ranks, told, strict=True):
        # Keras numbers layer names, so names may differ.
        kinds, first_kinds = ([kind for _, kind, _ in p] for p in (prints, told[0]))
        pairs = zip(prints, told[0], strict=False)
        others = [own[:2] for own, first in pairs if own[1:] != first[1:]]
        if kinds == first_kinds and not others:
            continue
        where = f"The ranks differ in {function}: on rank {rank}"
        if kinds != first_kinds:
            names = [[name for name, *_ in some] for some in (prints, told[0])]
            raise errors.MismatchError(
                f"{where} the preprocessing layers of the model are {names[0]}, but "
                f"on rank {ranks[0]} they are {names[1]}. Build the same model on all "
                "ranks."
            )
        name, kind = others[0]
        holds, advice = _ADVICE[getattr(keras.layers, kind)]
        raise errors.MismatchError(
            f"{where} the {kind} layer {name!r} has a different {holds} than on rank "
            f"{ranks[0]}, so the same sample would give different inputs. {advice}"
        )


def _adapted_layers(model: keras.layers.Layer) -> list[Any]:
    """Returns the layers without duplicates, in the same order on all ranks."""
    kinds = tuple(_ADVICE)
    layers = (one for one in model._flatten_layers() if isinstance(one, kinds))
    return list({id(layer): layer for layer in layers}.values())


def _kind(layer: Any) -> type:
    return next(kind for kind in _ADVICE if isinstance(layer, kind))


def _print_of(layer: Any) -> str:
    """Returns a cryptographic hash of the state of a layer."""
    words: list[str] = []
    if isinstance(layer, keras.layers.Normalization):
        # None before it is built; symbolic if it was built within a trace.
        is_known = layer.mean is not None and not tf.is_symbolic_tensor(layer.mean)
        numbers = [layer.mean, layer.variance] if is_known else []
    elif isinstance(layer, keras.layers.Discretization):
        numbers = [np.asarray(layer.bin_boundaries or [], np.float64)]
    else:
        weights = getattr(layer, "idf_weights_const", None)
        numbers = [] if weights is None else [weights]
        words = [str(one) for one in layer.get_vocabulary()]  # may be NumPy strings
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16)
    for array in numbers:
        digest.update(keras.ops.convert_to_numpy(array).tobytes())
    return digest.hexdigest()
