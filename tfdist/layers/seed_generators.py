"""Seeds the random number generators of layers: distinct or equal on the ranks."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import errors
from tfdist.collectives.objects import gather_from_all
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, check_root

CHOICES = ("distinct", "equal")
_NAME = "seed_generator_state"
# Keras takes the seed modulo this number before TensorFlow draws from it.
_MODULUS = 2**31 - 2
_PRIME = 0x9E3779B1  # does not divide _MODULUS, so its multiples are all different


def broadcast_seed_generators(
    model: keras.layers.Layer,
    seeds: str = "distinct",
    *,
    root: int = 0,
    process_set: ProcessSet | None = None,
) -> int:
    """Sets the random number generators of a model's layers by those of one rank.

    Dropout, noise and augmentation layers draw from generators that they hold
    (`keras.random.SeedGenerator`). With "distinct" every rank gets a seed of its own,
    which follows from that of `root`: the samples of all ranks get masks that are
    independent of each other, as those of one process's larger batch are. With "equal"
    all ranks have the masks of `root`. Either way a run is repeated by the same seed
    on `root`, e.g. by `keras.utils.set_random_seed`, whatever the others had.

    `BroadcastInitialState` does this at the start of `fit`. In a loop of your own call
    it once, when the model is built or loaded; again, it gives the same seeds, at the
    place where `root` is in its stream. Random numbers that come from no generator of a
    layer (`keras.random.normal(shape)`, `tf.random`, NumPy) are not changed: seed them
    with `tfdist.data.seed`.

    Args:
        model: a model or layer, built.
        seeds: "distinct" (default) or "equal".
        root: the rank whose generators count, and stay as they are; default 0.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        Number of generators.

    Raises:
        TypeError: `model` is no Keras layer.
        ValueError: `seeds` is something else; `root` is not a rank that takes part.
        tfdist.MismatchError: the ranks have different numbers of generators, or a
            rank has joined (`tfdist.join`); on all ranks that call it.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5)])
        >>> tfdist.layers.broadcast_seed_generators(model, "distinct")
        1
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"Expected a Keras model or layer, got {type(model).__name__}: {model!r}."
        )
    check_choice(seeds)
    members = list(check_root(root, process_set))
    states = states_of_generators(model)
    own = [[int(n) for n in keras.ops.convert_to_numpy(state)] for state in states]
    shared = gather_from_all(
        own,
        "broadcast_seed_generators",
        name="broadcast_seed_generators",
        process_set=process_set,
    )
    for rank, other in zip(members, shared, strict=True):
        if len(other) != len(shared[0]):
            raise errors.MismatchError(
                "The random number generators differ between ranks: the layers have "
                f"{len(shared[0])} on rank {members[0]} and {len(other)} on rank "
                f"{rank}. Make the same model on all ranks."
            )
    place = members.index(runtime.rank()) - members.index(root)
    distance = place % len(members) if seeds == "distinct" else 0
    for state, (seed, drawn) in zip(states, shared[members.index(root)], strict=True):
        state.assign([seed_at(seed, distance), drawn])
    return len(states)


def check_choice(seeds: str) -> None:
    """Raises ValueError if it is none."""
    if seeds not in CHOICES:
        raise ValueError(
            f"Expected the seed generators to be one of {list(CHOICES)}, got {seeds!r}."
        )


def seed_at(seed: int, distance: int) -> int:
    """Returns the seed of the rank that is `distance` ranks after that with `seed`.

    Different for all distances below 2**31 - 2, also for the kernels of TensorFlow,
    to which Keras gives seeds modulo that number.

    Example:
        >>> [seed_at(7, distance) for distance in range(3)]
        [7, 506952122, 1013904237]
    """
    return (seed + distance * _PRIME) % _MODULUS if distance else seed


def states_of_generators(model: keras.layers.Layer) -> list[Any]:
    """Returns the states of the layers' generators, each once, in order."""
    unique = {id(v): v for v in model.variables if v.name == _NAME}
    return list(unique.values())
