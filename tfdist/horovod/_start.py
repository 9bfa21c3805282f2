"""Setup of a rank of `tfdistrun --horovod`, before the first line of its program."""

from __future__ import annotations

import importlib

from tfdist.horovod._after_import import after_import
from tfdist.horovod._alias import activate
from tfdist.horovod._environment import adopt_variables, tell_place


def start() -> None:
    """Prepares this process for a program written for Horovod. Imports no TensorFlow.

    Raises:
        RuntimeError: Horovod itself has been imported.
        VariableError: a variable of Horovod has a value that means nothing.
    """
    activate()
    tell_place()
    adopt_variables()
    # TensorFlow imports Keras near the end of its own import, Keras imports
    # TensorFlow: only when both are complete can anything be changed in them.
    after_import(("tensorflow", "keras"), _change_keras)


def _change_keras() -> None:
    # By name: neither is needed by a program that does not use Keras.
    importlib.import_module("tfdist.horovod.keras2").activate()
    importlib.import_module("tfdist.horovod._unreduced").guard()
