"""A lock between the workers of pytest, and between several runs of the tests."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Waits until no other process of this machine is inside, for the same name."""
    with Path(tempfile.gettempdir(), f"tfdist-test-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
