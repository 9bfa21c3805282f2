"""Warnings that a job prints once, on rank 0, with the line of the script."""

from __future__ import annotations

import logging
import os
import sys

from tfdist.core import runtime
from tfdist.core.rendezvous.environment import detect

_logger = logging.getLogger("tfdist")
_warned: set[str] = set()


def is_first_rank() -> bool:
    """Whether this is rank 0, also before `hvd.init()`."""
    if runtime.is_initialized():
        return runtime.rank() == 0
    return detect(os.environ).rank == 0


def should_warn(text: str) -> bool:
    """Whether to print a warning: on rank 0, the first time."""
    if text in _warned:
        return False
    _warned.add(text)
    return is_first_rank()


def warn_once(text: str) -> None:
    """Logs a warning the first time; all ranks run one program, so on rank 0 only."""
    if should_warn(text):
        _logger.warning("%s", text)


def warn_unused_device(parameter: str, device: str) -> None:
    """Warns once that an argument which chooses a device for communication has no use.

    Args:
        parameter: name of the parameter.
        device: "" (no warning) or a name of TensorFlow's.
    """
    if device:
        warn_once(
            f"{parameter}={device!r} is not needed: gradients and variables are "
            "reduced in host memory, wherever they are computed. Leave it out."
        )


def reset() -> None:
    """Forgets which warnings have been printed."""
    _warned.clear()


def stacklevel_outside() -> int:
    """Returns the `stacklevel` of the nearest caller outside of the libraries."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(module: str) -> bool:
    return module.startswith(("keras.", "tfdist.", "tensorflow."))
