"""Ends operations that wait in Horovod without a time limit.

An operation of Horovod waits for a missing rank without a time limit, and nothing can
cancel it. (Horovod's own limit, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, had no effect when
tried with 0.28.1.) So a thread checks whether an operation is running, and how many
have ended. If an operation is running and none has ended for TFDIST_TIMEOUT_S, or a
rank is lost, the thread shuts Horovod down, which ends pending operations with an error
on every running rank. If the shutdown does not return, for example because a rank is
stopped, the thread terminates this process.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from collections.abc import Callable

from tfdist.collectives.engines.horovod._counts import Counts
from tfdist.core import native

_LOOK_S = 0.25
_RELEASE_S = 1.0  # after a rank was lost; Horovod usually detects this itself
_DIE_S = 10.0


class Verdict(enum.Enum):
    """Action that the watch takes on pending operations."""

    WAIT = "wait"
    LATE = "late"  # a rank has not made the call within the limit
    RELEASE = "release"  # a rank is lost
    DIE = "die"  # a rank is lost, and the shutdown of Horovod does not return


def verdict(stuck_s: float, lost_s: float | None, limit_s: float) -> Verdict:
    """Decides what to do with operations that have started but not ended.

    Args:
        stuck_s: seconds since an operation last ended, or since none was running.
        lost_s: seconds since the world is known to have failed; None if it has not.
        limit_s: longest time in seconds that an operation may wait.

    Example:
        >>> verdict(stuck_s=3.0, lost_s=None, limit_s=300.0)
        <Verdict.WAIT: 'wait'>
    """
    if lost_s is None:
        return Verdict.LATE if stuck_s > limit_s else Verdict.WAIT
    waited_s = min(stuck_s, lost_s)
    if waited_s > _DIE_S:
        return Verdict.DIE
    return Verdict.RELEASE if waited_s > _RELEASE_S else Verdict.WAIT


class Watch:
    """The watch thread, which runs while Horovod runs.

    Args:
        counts: numbers of running and ended operations.
        release: shuts Horovod down; may never return.
        limit_s: longest time in seconds that an operation may wait.
    """

    def __init__(
        self,
        counts: Counts,
        release: Callable[[], object],
        limit_s: float,
    ) -> None:
        self.late: native.CoreError | None = None
        self._counts = counts
        self._release = release
        self._limit_s = limit_s
        self._ended = threading.Event()
        self._releasing: threading.Thread | None = None
        self._thread = threading.Thread(
            target=self._run, name="tfdist-horovod-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        before, since, lost_since = 0, time.monotonic(), None
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            ended = self._counts.ended_count()
            if ended != before or not self._counts.is_waiting():
                before, since = ended, now
            failure = self.late or native.failure()
            if failure is not None and lost_since is None:
                lost_since = now
            lost_s = None if lost_since is None else now - lost_since
            found = verdict(now - since, lost_s, self._limit_s)
            if found is Verdict.LATE:
                self.late = _late(self._limit_s)
                native.abort(self.late.message)
            elif found is not Verdict.WAIT and self._releasing is None:
                self._releasing = threading.Thread(target=self._release, daemon=True)
                self._releasing.start()
            elif found is Verdict.DIE and self._is_releasing():
                print(
                    f"[tfdist] {failure}. Horovod does not end an operation that waits "
                    "for other ranks; this process exits.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    def _is_releasing(self) -> bool:
        return self._releasing is not None and self._releasing.is_alive()


def _late(limit_s: float) -> native.CoreError:
    message = (
        f"an operation timed out: it waited {limit_s:g} s in Horovod for ranks that "
        "are alive but did not call it; look for a step that only some ranks run, or "
        "raise TFDIST_TIMEOUT_S"
    )
    payload = {"kind": "timeout", "cause": message}
    return native.CoreError(native.DEADLINE_EXCEEDED, message, payload)
