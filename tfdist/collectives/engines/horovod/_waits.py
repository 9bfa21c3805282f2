"""Waiting for all ranks with a deadline, by the core: Horovod has none of its own."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from tfdist.core import native


def for_all(name: str, process_set: int, timeout_s: float) -> None:
    """Returns when all ranks of a process set have called it.

    Args:
        name: pairs the calls of the ranks.
        process_set: number of the set; 0: all ranks.
        timeout_s: seconds to wait; 0: TFDIST_TIMEOUT_S.

    Raises:
        native.CoreError: a rank did not come, and which, or failed.
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
    """Waits for all ranks of the job, or until one of them is lost or does not come.

    In a thread of its own, so that Ctrl-C gets through.
    """

    def run() -> None:
        with contextlib.suppress(native.CoreError):
            for_all(name, 0, 0.0)

    waiting = threading.Thread(target=run, name="tfdist-horovod-leaves", daemon=True)
    waiting.start()
    waiting.join()
