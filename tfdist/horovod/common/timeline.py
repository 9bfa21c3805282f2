"""start_timeline and stop_timeline, over the timeline that `tfdist.init` can write."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tfdist.core import native, runtime, world
from tfdist.horovod._warnings import warn_once

_log = logging.getLogger("tfdist")
_begins_us: list[int] = []  # start time of the requested part, until it ends


def start(file_path: str) -> None:
    """Starts this rank's timeline in the folder `file_path` + ".d", once per run.

    Later calls start a new part in the same timeline; if they name a different folder,
    a warning names the folder in use.
    """
    try:
        folder = world.start_timeline(f"{file_path}.d")
    except native.CoreError as error:
        runtime.raise_public(error)
    if folder != Path(f"{file_path}.d").absolute():
        warn_once(
            f"start_timeline({str(file_path)!r}): the timeline of this run is already "
            f"written to {folder}, and continues there. A run has one folder; the part "
            "between start_timeline and stop_timeline is marked in it."
        )
    _log.info("timeline of this rank: %s", folder)
    _begins_us[:] = [time.monotonic_ns() // 1000]


def stop() -> None:
    """Marks the part between `start` and now."""
    if _begins_us:
        begin_us = _begins_us.pop()
        native.timeline_span("timeline", begin_us, time.monotonic_ns() // 1000)
