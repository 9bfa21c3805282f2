"""Horovod mode of `tfdistrun`: makes `horovod` importable in every rank.

A folder with a `sitecustomize.py` is put in front of PYTHONPATH. Python runs that file
before the first line of any program. This also works if the command is a shell script
that starts Python, and leaves `sys.argv` and `__main__` unchanged. It does not work if
Python ignores PYTHONPATH (`python -E`, `python -I`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist.launch.horovod import variables
from tfdist.launch.hosts import Place

FOLDER = Path(__file__).resolve().parents[2] / "horovod" / "_path"


def with_folder(python_path: str) -> str:
    """Returns PYTHONPATH with `FOLDER` in front, and nowhere else."""
    parts = [part for part in python_path.split(os.pathsep) if part]
    own = str(FOLDER)
    return os.pathsep.join([own, *(part for part in parts if part != own)])


def as_python(command: list[str]) -> list[str]:
    """Returns the command; puts Python in front of a script that is not executable.

    Example:
        >>> from tfdist.launch.horovod import mode
        >>> mode.as_python(["train.py", "--epochs", "3"])[1:]
        ['train.py', '--epochs', '3']
    """
    command = command[1:] if command[:1] == ["--"] else command
    if command and command[0].endswith(".py") and not shutil.which(command[0]):
        return [sys.executable, *command]
    return command


def prepare(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Changes tfdistrun's options for a job of Horovod programs.

    Args:
        options: the options; `command` and `env` are changed.
        environ: environment variables of this process.

    Returns:
        Warnings for the user about settings that have no effect.

    Raises:
        VariableError: a Horovod variable has an invalid value, or TF_USE_LEGACY_KERAS
            is set.
    """
    options.command = as_python(options.command)
    given = {**environ, **dict(options.env)}
    if given.get("TF_USE_LEGACY_KERAS", "0") not in ("", "0", "False", "false"):
        raise variables.VariableError(
            "TF_USE_LEGACY_KERAS is set: tf_keras (Keras 2) is not supported. Unset "
            "it: with --horovod, Keras 2 spellings work in Keras 3"
        )
    found = variables.update(given)
    theirs = {k: v for k, v in given.items() if k.startswith(variables.PREFIX)}
    options.env = [
        *options.env,
        *theirs.items(),  # so that ranks on other hosts get them too
        *found.settings.items(),
        (variables.STATE, found.state),
        ("PYTHONPATH", with_folder(given.get("PYTHONPATH", ""))),
    ]
    return found.notes


def variables_of(place: Place, size: int) -> dict[str, str]:
    """Returns the variables that Horovod's launcher sets for a rank's place."""
    return variables.of_rank(
        place.rank,
        size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        cross_rank=place.cross_rank,
        cross_size=place.cross_size,
    )
