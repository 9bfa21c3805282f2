"""start_timeline and stop_timeline, based on the timeline that tfdist writes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from tfdist.core import native, runtime, world
from tfdist.core.rendezvous import renewal
from tfdist.horovod._warnings import warn_once

_log = logging.getLogger("tfdist")
_begins_us: list[int] = []  # start of the interval that `stop` will mark; or empty


def start(file_path: str) -> None:
    """Starts this rank's timeline in the folder `file_path` + ".d", once per run.

    A later call starts a new interval in the same timeline. If it is given a different
    path, a warning states the folder in use.

    Raises:
        ValueError: the job is elastic.
    """
    if renewal.is_elastic(os.environ):
        raise ValueError(
            "A timeline cannot be recorded in an elastic job. Omit hvd.start_timeline, "
            "or start the job without --min-np."
        )
    try:
        folder = world.start_timeline(f"{file_path}.d")
    except native.CoreError as error:
        runtime.raise_public(error)
    if folder != Path(f"{file_path}.d").absolute():
        warn_once(
            f"start_timeline({str(file_path)!r}): the timeline of this run is already "
            f"written to {folder}, and continues there. A run has one timeline; the "
            "interval from start_timeline to stop_timeline is marked in it."
        )
    _log.info("timeline of this rank: %s", folder)
    _begins_us[:] = [time.monotonic_ns() // 1000]


def stop() -> None:
    """Marks the interval from `start` until now."""
    if _begins_us:
        begin_us = _begins_us.pop()
        native.timeline_span("timeline", begin_us, time.monotonic_ns() // 1000)
