"""Saves the states of a model's random number generators in its .keras file.

Keras does not save these states, so resumed training would repeat the dropout masks.
Keras ignores the additional member of the archive.
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
    """Adds this rank's generator states to a file that Keras has saved."""
    states = [
        [int(n) for n in keras.ops.convert_to_numpy(state)]
        for state in states_of_generators(model)
    ]
    if states:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_MEMBER, json.dumps(states))


def read_states(path: str | os.PathLike[str]) -> list[list[int]] | None:
    """Returns the states in a file; None if the file contains no states.

    Raises:
        ValueError: the file cannot be read, or the states in it are damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if _MEMBER not in archive.namelist():
                return None
            found = json.loads(archive.read(_MEMBER))
            return [[int(seed), int(drawn)] for seed, drawn in found]
    except (zipfile.BadZipFile, OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"Expected states of random number generators in {path}, got: {error}. "
            "Use an older checkpoint."
        ) from None


def set_states(model: keras.Model, states: list[list[int]] | None) -> bool:
    """Restores the states of this rank's generators, if their number matches.

    Returns:
        Whether the states were restored.
    """
    own = states_of_generators(model)
    if states is None:
        return False
    if len(own) != len(states):
        _logger.warning(
            "The checkpoint contains the states of %d random number generators "
            "(dropout, noise, augmentation), but the model has %d generators. The "
            "model's generators are not changed.",
            len(states),
            len(own),
        )
        return False
    for state, value in zip(own, states, strict=True):
        state.assign(value)
    return True
