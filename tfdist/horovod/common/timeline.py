"""start_timeline and stop_timeline, over the timeline that `tfdist.init` can write."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tfdist.core import native, runtime, world
from tfdist.horovod._warnings import warn_once

_log = logging.getLogger("tfdist")
_begins_us: list[int] = []  # of the part that was asked for, while it lasts


def start(file_path: str) -> None:
    """Begins this rank's part, in the folder `file_path` + ".d"; once in a world.

    Later calls mark another part of it; a warning names the folder if it is another.
    """
    try:
        folder = world.start_timeline(f"{file_path}.d")
    except native.CoreError as error:
        runtime.raise_public(error)
    if folder != Path(f"{file_path}.d").absolute():
        warn_once(
            f"start_timeline({str(file_path)!r}): the timeline of this run is written "
            f"to {folder} already, and goes on there. A run has one folder; what is "
            "between start_timeline and stop_timeline is marked in it."
        )
    _log.info("timeline of this rank: %s", folder)
    _begins_us[:] = [time.monotonic_ns() // 1000]


def stop() -> None:
    """Marks what was between `start` and now."""
    if _begins_us:
        begin_us = _begins_us.pop()
        native.timeline_span("timeline", begin_us, time.monotonic_ns() // 1000)
