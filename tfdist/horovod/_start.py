"""Prepares a rank of `tfdistrun --horovod` before its program starts."""

from __future__ import annotations

import importlib

from tfdist.horovod._after_import import after_import
from tfdist.horovod._alias import activate
from tfdist.horovod._environment import adopt_variables, tell_place


def start() -> None:
    """Prepares this process for a Horovod program, without importing TensorFlow.

    Raises:
        RuntimeError: Horovod itself has been imported, or `TFDIST_ENGINE=horovod`
            selects it.
        VariableError: a Horovod variable has an invalid value.
    """
    activate()
    tell_place()
    adopt_variables()
    # TensorFlow imports Keras near the end of its own import, and Keras imports
    # TensorFlow. Neither can be patched before both imports are complete.
    after_import(("tensorflow", "keras"), _change_keras)


def _change_keras() -> None:
    # Imported here, because a program that does not use Keras needs neither module.
    importlib.import_module("tfdist.horovod.keras2").activate()
    importlib.import_module("tfdist.horovod._unreduced").guard()
