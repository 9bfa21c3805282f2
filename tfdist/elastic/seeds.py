"""Random streams of a model's layers, which belong to ranks, not to processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.core import runtime
from tfdist.layers.seed_generators import STATE_NAME, seed_at


class SeedsByRank:
    """The seeds of random number generators, derived from the rank.

    Rank r draws from the stream `seed_at(seed, r)`, where `seed` is the seed of rank 0
    at the start. After the ranks have changed, `set_for_rank` sets the seeds for the
    new rank of this process. The positions in the streams do not change.

    Args:
        variables: variables of a `State`; only those of `keras.random.SeedGenerator`
            are used.

    Attributes:
        variables: a variable with the seeds of rank 0 at the start, which is sent to
            other ranks together with the variables of the `State`; empty if there are
            no generators.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._states = [v for v in variables if v.name == STATE_NAME]
        seeds = [int(keras.ops.convert_to_numpy(one)[0]) for one in self._states]
        name = "seeds of rank 0"
        self.variables: list[tf.Variable] = (
            [tf.Variable(seeds, dtype=tf.int64, trainable=False, name=name)]
            if seeds
            else []
        )

    def set_for_rank(self) -> None:
        """Sets the seeds for the current rank of this process."""
        if not self.variables:
            return
        seeds = self.variables[0].numpy()
        for state, seed in zip(self._states, seeds, strict=True):
            drawn = int(keras.ops.convert_to_numpy(state)[1])
            state.assign([seed_at(int(seed), runtime.rank()), drawn])
