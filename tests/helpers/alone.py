"""A test in a process of its own: one that forks needs a process without threads."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.deadline import PATIENCE

TESTS = Path(__file__).resolve().parents[1]
_INSIDE = "TEST_RUNS_ALONE"


def alone(timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test that a new pytest shall run; it fails with that one's output."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            if _INSIDE in os.environ:
                test(*args, **kwargs)
                return
            node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
            flags = ("-q", "--no-header", "-p", "no:cacheprovider", "-m", "")
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *flags, node],
                cwd=TESTS.parent,
                env={**os.environ, _INSIDE: "1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE * timeout_s,
            )
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

        return run

    return decorate
