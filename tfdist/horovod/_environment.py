"""Horovod's environment variables in a rank."""

from __future__ import annotations

import logging
import os

from tfdist.core.rendezvous.environment import detect
from tfdist.launch.horovod import variables

_logger = logging.getLogger("tfdist")


def adopt_variables() -> None:
    """Translates Horovod variables that have changed since the last call.

    `tfdistrun --horovod` has translated the variables set at startup. `hvd.init()`
    calls this function because a program may change variables itself. Rank 0 logs the
    variables that tfdist does not use.

    Raises:
        VariableError: a variable has an invalid value.

    Example:
        >>> from tfdist.horovod._environment import adopt_variables
        >>> adopt_variables()
    """
    found = variables.update(os.environ)
    if not (found.settings or found.removed or found.notes):
        return
    os.environ.update(found.settings)
    for name in found.removed:
        del os.environ[name]
    os.environ[variables.STATE] = found.state
    if detect(os.environ).rank == 0:
        for note in found.notes:
            _logger.warning("%s", note)


def tell_place() -> None:
    """Sets HOROVOD_RANK and related variables if the launcher has not set them."""
    place = detect(os.environ)
    if place.source == "single":
        return  # without a launcher, Horovod does not set them either
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
