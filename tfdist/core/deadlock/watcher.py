"""Reports a rank whose program waits in collectives, to detect deadlocks early.

While operations wait and no data moves, a thread inspects the Python stacks of this
process. If all threads that call collectives wait inside a collective, the thread
reports the position to the core. The core compares the reports of all ranks, and raises
an error on all of them if no rank can continue
(docs/design/0011-ranks-that-wait-for-each-other.md).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Set
from types import FrameType

from tfdist.core import native
from tfdist.core.deadlock import call_stack

INTERVAL_S = 0.25
# Seconds without progress before a wait in an eager call or in a function is reported.
EAGER_S, GRAPH_S = 0.5, 1.0
# Fraction of the timeout after which a function is considered permanently blocked, and
# bounds of that time in seconds.
_PATIENCE, _LEAST_S, _MOST_S = 1 / 20, 1.0, 15.0
EAGER, GRAPH, PATIENT = 0, 1, 2
# Blocking calls of the core, as functions of `native`.
_BLOCKING = ("register_gradient_list", "add_process_set", "remove_process_set")
# Files in which a thread waits for another thread of this process.
_IDLE = ("threading.py", "queue.py", "selectors.py", "socket.py", "connection.py")

# Threads that have called or traced a collective.
callers: set[int] = set()


class DeadlockWatcher:
    """The thread that reports a blocked program; `tfdist.shutdown` closes it.

    Args:
        timeout_s: longest time that operations wait (TFDIST_TIMEOUT_S), in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._patience_s = min(max(timeout_s * _PATIENCE, _LEAST_S), _MOST_S)
        self._stop = threading.Event()
        self._reported: tuple[int, int] | None = None
        callers.clear()
        self._thread = threading.Thread(
            target=self._run, name="tfdist-deadlock", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            still_s, moves = native.still()
            if still_s >= EAGER_S:
                self._report(still_s, moves)

    def _report(self, still_s: float, moves: int) -> None:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        main = threading.main_thread().ident
        found = survey(frames, callers, main, _helpers())
        if found is None:
            return
        how, frame = found
        if how != EAGER and still_s >= self._patience_s:
            how = PATIENT
        is_early = how == PATIENT and still_s < self._patience_s
        is_early = is_early or (how == GRAPH and still_s < GRAPH_S)
        if is_early or self._reported == (moves, how):
            return
        self._reported = (moves, how)
        native.report_blocked(moves, how, call_stack.describe_place(frame))


def survey(
    frames: dict[int, FrameType],
    callers: Set[int],
    main: int | None,
    helpers: Set[int] = frozenset(),
) -> tuple[int, FrameType] | None:
    """Determines whether the program waits in collectives.

    Args:
        frames: the innermost frame of each thread, by its identity.
        callers: threads that have called collectives.
        main: the main thread; if it waits, its frame is returned.
        helpers: daemon threads. While the main thread waits in a collective, daemon
            threads that have called no collective are not expected to call one.

    Returns:
        EAGER, GRAPH or PATIENT (see `native.report_blocked`), and the innermost frame
        of a waiting thread. PATIENT means that the wait is reported only if it lasts.
        None if no thread waits, or if a thread that calls collectives does something
        else.
    """
    kinds = {thread: _wait_kind(frame) for thread, frame in frames.items()}
    waiting = {t: frames[t] for t, how in kinds.items() if how is not None}
    others = frames.keys() - waiting.keys()
    if not waiting or others & callers:
        return None
    how = max(how for how in kinds.values() if how is not None)
    expected = others - helpers if main in waiting else others
    if any(_may_call(frames[thread]) for thread in expected):
        how = PATIENT
    thread = main if main in waiting else next(iter(waiting))
    return how, waiting[thread]  # type: ignore[index]


def _helpers() -> set[int]:
    """Returns the daemon threads that Python has started."""
    return {
        one.ident
        for one in threading.enumerate()
        if one.ident is not None
        and one.daemon
        and not isinstance(one, threading._DummyThread)
    }


def _wait_kind(frame: FrameType) -> int | None:
    """Returns EAGER in a collective, GRAPH in a TensorFlow function, else None."""
    owner = call_stack.owner_of(frame)
    function = frame.f_code.co_name
    if owner == "tfdist":
        is_blocking = function.startswith("tfdist_") or (
            function in _BLOCKING and frame.f_globals.get("__name__") == native.__name__
        )
        return EAGER if is_blocking else None
    return GRAPH if owner == "tensorflow" else None


def _may_call(frame: FrameType) -> bool:
    """Returns whether a thread runs user code and does not wait for another thread."""
    if frame.f_code.co_filename.endswith(_IDLE):
        return False
    return any(call_stack.owner_of(one) == "user" for one in call_stack.outwards(frame))
