"""Horovod's environment variables in a rank."""

from __future__ import annotations

import logging
import os

from tfdist.core.rendezvous.environment import detect
from tfdist.launch.horovod import variables

_logger = logging.getLogger("tfdist")


def adopt_variables() -> None:
    """Translates variables of Horovod that were not set when last looked at.

    `hvd.init()` calls it, because a program may set some itself; `tfdistrun --horovod`
    has translated those that it was started with. Rank 0 logs what has no meaning here.

    Raises:
        VariableError: a value means nothing.

    Example:
        >>> from tfdist.horovod._environment import adopt_variables
        >>> adopt_variables()
    """
    found = variables.update(os.environ)
    if not (found.settings or found.notes):
        return
    os.environ.update(found.settings)
    os.environ[variables.STATE] = found.state
    if detect(os.environ).rank == 0:
        for note in found.notes:
            _logger.warning("%s", note)


def tell_place() -> None:
    """Sets HOROVOD_RANK and its like where another launcher has started the ranks."""
    place = detect(os.environ)
    if place.source == "single":
        return  # Horovod does not set them either, where nothing has started ranks
    told = {
        "HOROVOD_RANK": place.rank,
        "HOROVOD_SIZE": place.size,
        "HOROVOD_LOCAL_RANK": place.local_rank,
        "HOROVOD_LOCAL_SIZE": place.local_size,
        "HOROVOD_CROSS_RANK": place.cross_rank,
        "HOROVOD_CROSS_SIZE": place.cross_size,
    }
    for name, value in told.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
