"""Warnings that a job gives once, of the line of the script that they are about."""

from __future__ import annotations

import logging
import os
import sys

from tfdist.core import runtime
from tfdist.core.rendezvous.environment import detect

_logger = logging.getLogger("tfdist")
_told: set[str] = set()


def is_first_rank() -> bool:
    """Whether this is rank 0, also before `hvd.init()`."""
    if runtime.is_initialized():
        return runtime.rank() == 0
    return detect(os.environ).rank == 0


def is_new(text: str) -> bool:
    """Whether to tell something: on rank 0, the first time."""
    if text in _told:
        return False
    _told.add(text)
    return is_first_rank()


def tell_once(text: str) -> None:
    """Logs a warning, if it is new. All ranks run the same program: rank 0 does it."""
    if is_new(text):
        _logger.warning("%s", text)


def note_device(parameter: str, device: str) -> None:
    """Says once that a device for communication is not chosen here.

    Args:
        parameter: name of the parameter.
        device: "" (nothing is said) or a name of TensorFlow's.
    """
    if device:
        tell_once(
            f"{parameter}={device!r} is not needed: gradients and variables are "
            "reduced in host memory, wherever they are computed. Leave it out."
        )


def forget() -> None:
    """Lets everything be told again."""
    _told.clear()


def outside() -> int:
    """The `stacklevel` of the line outside of the libraries, for who calls this."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(module: str) -> bool:
    return module.startswith(("keras.", "tfdist.", "tensorflow."))
