"""A hard limit for one test: past it, the test fails with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

# Limits of tests are what a fast, idle machine keeps with ease. They are there to end
# what hangs, so a slow or busy machine has this many times as long.
PATIENCE = 3.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DeadlinePassedError(BaseException):
    """Not an Exception: no `except Exception` of the code under test may eat it."""


def deadline(seconds: float) -> Callable[[_Function], _Function]:
    """Decorates a test that must end within `seconds` (main thread only), on an idle
    machine: the limit is `PATIENCE` times as long."""
    limit_s = PATIENCE * seconds

    def alarm(signum: int, frame: object) -> None:
        del signum, frame
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        raise DeadlinePassedError(f"the test ran longer than {limit_s:g} s")

    def decorate(test: _Function) -> _Function:
        @functools.wraps(test)
        def limited(*args: Any, **kwargs: Any) -> Any:
            previous = signal.signal(signal.SIGALRM, alarm)
            outer_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                return test(*args, **kwargs)
            finally:
                signal.signal(signal.SIGALRM, previous)
                signal.setitimer(signal.ITIMER_REAL, outer_s)  # 0.0: none

        return limited  # type: ignore[return-value]

    return decorate
