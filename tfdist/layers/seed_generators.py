"""Seeds the random number generators of layers, with distinct or equal seeds."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import errors
from tfdist.collectives.objects import gather_from_all
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, check_root

CHOICES = ("distinct", "equal")
STATE_NAME = "seed_generator_state"
# Keras reduces the seed modulo this number before TensorFlow draws from it.
_MODULUS = 2**31 - 2
_PRIME = 0x9E3779B1  # does not divide _MODULUS, so its multiples are all different


def broadcast_seed_generators(
    model: keras.layers.Layer,
    seeds: str = "distinct",
    *,
    root: int = 0,
    process_set: ProcessSet | None = None,
) -> int:
    """Seeds the random number generators of a model's layers from those of rank `root`.

    Dropout, noise and augmentation layers have their own generators
    (`keras.random.SeedGenerator`). With "distinct", every rank gets a different seed,
    derived from the seed of `root`. The samples of all ranks then have independent
    masks, as in a larger batch of one process. With "equal", all ranks have the masks
    of `root`. In both cases a run can be reproduced with the same seed on `root`, e.g.
    from `keras.utils.set_random_seed`. The earlier seeds of other ranks have no effect.

    `BroadcastInitialState` calls this function at the start of `fit`. In a custom loop,
    call it once after the model is built or loaded. A later call sets the same seeds
    again, at the current position in the random stream of `root`. Random numbers that
    do not come from a generator of a layer (`keras.random.normal(shape)`, `tf.random`,
    NumPy) are not affected. Seed these with `tfdist.data.seed`.

    Args:
        model: a built model or layer.
        seeds: "distinct" (default) or "equal".
        root: the rank whose generators are used and not changed; default 0.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Number of generators.

    Raises:
        TypeError: `model` is not a Keras layer.
        ValueError: `seeds` is invalid, or `root` does not take part.
        tfdist.MismatchError: the ranks have different numbers of generators, or a
            rank has joined (`tfdist.join`). All ranks that call the function raise it.

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
                f"{rank}. Build the same model on all ranks."
            )
    place = members.index(runtime.rank()) - members.index(root)
    distance = place % len(members) if seeds == "distinct" else 0
    for state, (seed, drawn) in zip(states, shared[members.index(root)], strict=True):
        state.assign([seed_at(seed, distance), drawn])
    return len(states)


def check_choice(seeds: str) -> None:
    """Raises ValueError unless `seeds` is one of `CHOICES`."""
    if seeds not in CHOICES:
        raise ValueError(
            f"Expected seed generators to be one of {list(CHOICES)}, got {seeds!r}."
        )


def seed_at(seed: int, distance: int) -> int:
    """Returns the seed of the rank that is `distance` ranks after the rank with `seed`.

    The seeds are different for all distances below 2**31 - 2. They are also different
    in TensorFlow's kernels, to which Keras passes seeds modulo this number.

    Example:
        >>> [seed_at(7, distance) for distance in range(3)]
        [7, 506952122, 1013904237]
    """
    return (seed + distance * _PRIME) % _MODULUS if distance else seed


def states_of_generators(model: keras.layers.Layer) -> list[Any]:
    """Returns the states of the layers' generators, in order and without duplicates."""
    unique = {id(v): v for v in model.variables if v.name == STATE_NAME}
    return list(unique.values())
