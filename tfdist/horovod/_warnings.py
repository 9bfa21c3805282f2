"""Warnings that are printed once per job, on rank 0, with the line of the script."""

from __future__ import annotations

import logging
import os
import sys

from tfdist.core import runtime
from tfdist.core.rendezvous.environment import detect

_logger = logging.getLogger("tfdist")
_warned: set[str] = set()


def is_first_rank() -> bool:
    """Returns whether this is rank 0; also works before `hvd.init()`."""
    if runtime.is_initialized():
        return runtime.rank() == 0
    return detect(os.environ).rank == 0


def should_warn(text: str) -> bool:
    """Returns whether to print a warning: on rank 0, and only the first time."""
    if text in _warned:
        return False
    _warned.add(text)
    return is_first_rank()


def warn_once(text: str) -> None:
    """Logs a warning once, and only on rank 0, since all ranks run the same program."""
    if should_warn(text):
        _logger.warning("%s", text)


def warn_unused_device(parameter: str, device: str) -> None:
    """Warns once that the communication device passed by the user is not used.

    Args:
        parameter: name of the parameter.
        device: "" (no warning) or a TensorFlow device name.
    """
    if device:
        warn_once(
            f"{parameter}={device!r} is not needed: gradients are reduced, and "
            "variables broadcast, in host memory, whatever their device. Omit it."
        )


def reset() -> None:
    """Forgets which warnings have been printed."""
    _warned.clear()


def stacklevel_outside() -> int:
    """Returns the `stacklevel` of the nearest caller outside the libraries."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(module: str) -> bool:
    return module.startswith(("keras.", "tfdist.", "tensorflow."))
