"""Deadlines for every test, the end of the worker processes, and common pictures."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.deadline import PATIENCE, DeadlinePassedError

# A plug-in would do the same by the same signal, and be one more thing to install.
TEST_TIMEOUT_S = 120.0 * PATIENCE
SLOW_TIMEOUT_S = 1200.0
# Messages of an engine that cannot do something.
REFUSED = re.compile(
    r"The engine '\w+' cannot do this: [^.;]{1,60}"
    r"|Horovod does not reduce \w+ by \w+"
    r"|TFDIST_\w+=\S* has no effect with TFDIST_ENGINE=\w+"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Ends a test that takes too long; it fails with the stacks of all threads."""
    limit_s = SLOW_TIMEOUT_S if item.get_closest_marker("slow") else TEST_TIMEOUT_S
    own = item.get_closest_marker("deadline")
    if own is not None:
        limit_s = own.args[0] * PATIENCE

    def alarm(signum: int, frame: object) -> None:
        del signum, frame
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        raise DeadlinePassedError(f"{item.nodeid} ran longer than {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With another engine (TFDIST_ENGINE): what it refuses is skipped, and counted."""
    report = yield
    engine = os.environ.get("TFDIST_ENGINE", "native")
    if report.failed and call.excinfo is not None and engine != "native":
        found = REFUSED.search(str(call.excinfo.value))
        if found:
            report.outcome = "skipped"
            where, line, _ = item.location
            report.longrepr = (where, line or 0, f"Skipped: {found.group(0)}")
    return report


def pytest_collection_finish() -> None:
    """Spares the garbage collector what was imported, as `helpers.rank_worker` does."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Ends the worker processes before pytest does."""
    ranks = sys.modules.get("helpers.ranks")
    if ranks is not None:
        ranks.close_pool()


@pytest.fixture(scope="session")
def tiny_imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data_dir of 200 and 50 made pictures, as the real builder prepares them.

    Each split has 3 files. It is made once for all tests: nobody may write to it. Other
    forms of the same pictures: `helpers.pictures`.
    """
    from helpers import pictures

    folder = tmp_path_factory.mktemp("tiny_imagenet")
    return pictures.prepared(folder, files=3, train=200, validation=50, size=64)
