"""Waits for all ranks through the core, with a deadline that Horovod does not have."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from tfdist.core import native


def for_all(name: str, process_set: int, timeout_s: float) -> None:
    """Waits until all ranks of a process set have called this function.

    Args:
        name: operation name; calls with the same name on different ranks are matched.
        process_set: id of the process set; 0: all ranks.
        timeout_s: seconds to wait; 0: TFDIST_TIMEOUT_S.

    Raises:
        native.CoreError: a rank failed, or did not make the call; the error names it.
    """
    found: list[native.CoreError | None] = []

    def done(context: int | None, status: Any) -> None:
        del context
        ended = status.contents
        found.append(native.to_core_error(ended) if ended.code != 0 else None)

    request = native.Request(
        kind=native.BARRIER,
        name=name.encode(),
        dtype=1,
        peer=-1,
        prescale=1.0,
        postscale=1.0,
        timeout_s=timeout_s,
        process_set=process_set,
        algorithm=b"",
        done=native.DoneCallback(done),
    )
    native.check(native.library().tfdist_run(ctypes.byref(request)))
    if found and found[0] is not None:
        raise found[0]


def unless_lost(name: str) -> None:
    """Waits for all ranks of the job; returns early if a rank is lost.

    Waits at most TFDIST_TIMEOUT_S. Runs in a separate thread, so that Ctrl-C is
    handled.
    """

    def run() -> None:
        with contextlib.suppress(native.CoreError):
            for_all(name, 0, 0.0)

    waiting = threading.Thread(target=run, name="tfdist-horovod-leaves", daemon=True)
    waiting.start()
    waiting.join()
