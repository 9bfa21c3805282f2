"""Saves the states of a model's random number generators in its .keras file.

Keras does not save them, so a resumed training would repeat the masks of dropout. Keras
ignores the additional member of the file.
"""

from __future__ import annotations

import json
import logging
import os
import zipfile
from pathlib import Path

import keras

from tfdist.layers.seed_generators import states_of_generators

_MEMBER = "tfdist/seed_generators.json"
_logger = logging.getLogger("tfdist")


def add_states(path: Path, model: keras.Model) -> None:
    """Adds the states of this rank to a file that Keras has saved."""
    states = [
        [int(n) for n in keras.ops.convert_to_numpy(state)]
        for state in states_of_generators(model)
    ]
    if states:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_MEMBER, json.dumps(states))


def read_states(path: str | os.PathLike[str]) -> list[list[int]] | None:
    """Returns the states in a file; None if it has none (saved by Keras alone).

    Raises:
        ValueError: that part of the file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if _MEMBER not in archive.namelist():
                return None
            found = json.loads(archive.read(_MEMBER))
            return [[int(seed), int(drawn)] for seed, drawn in found]
    except (zipfile.BadZipFile, OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"Expected the states of random number generators in {path}, got: {error}. "
            "Take an older checkpoint."
        ) from None


def set_states(model: keras.Model, states: list[list[int]] | None) -> bool:
    """Gives this rank's generators the states of a file, if they are of this model.

    Returns:
        Whether it did.
    """
    own = states_of_generators(model)
    if states is None:
        return False
    if len(own) != len(states):
        _logger.warning(
            "The checkpoint has the states of %d random number generators (dropout, "
            "noise, augmentation), and the model has %d: they stay as they are.",
            len(states),
            len(own),
        )
        return False
    for state, value in zip(own, states, strict=True):
        state.assign(value)
    return True
