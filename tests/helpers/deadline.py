"""A hard limit for one test: past it, the test fails with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

# A limit ends a test that hangs. Each is written for an idle machine, and multiplied by
# this for slow and busy ones. What a test asserts about times is not.
PATIENCE = 3.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DeadlinePassedError(BaseException):
    """Not an Exception: no `except Exception` of the code under test may eat it."""


def deadline(seconds: float) -> Callable[[_Function], _Function]:
    """Decorates a test that may not hang (main thread only).

    Args:
        seconds: limit for an idle machine; the test is ended after `PATIENCE` times as
            long.
    """
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
