"""Files are written on a thread, one after the other, and errors are warnings."""

import threading
from pathlib import Path

import pytest

from tfdist.callbacks._background_writer import BackgroundWriter, Job

WAIT_S = 20.0


class Disk:
    """Writes files when it is told to; remembers which."""

    def __init__(self):
        self.written = []
        self.error = None
        self._may_write = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)

    def job(self, name):
        def write():
            self._has_begun.release()
            assert self._may_write.acquire(timeout=WAIT_S)
            if self.error is not None:
                raise self.error
            self.written.append(name)

        return Job(Path("run", name), write)

    def begun(self):
        assert self._has_begun.acquire(timeout=WAIT_S)

    def go_on(self, count=1):
        self._may_write.release(count)


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.go_on(100)


def test_submit_returns_before_the_file_is_written(disk):
    writer = BackgroundWriter()
    assert writer.wait(0.0)
    writer.submit(disk.job("a"))
    disk.begun()
    assert disk.written == [] and not writer.wait(0.0)
    disk.go_on()
    assert writer.wait(WAIT_S) and disk.written == ["a"]


def test_the_newest_of_those_that_wait_is_written(disk, caplog):
    writer = BackgroundWriter()
    writer.submit(disk.job("a"))
    disk.begun()
    for name in ("b", "c", "d"):
        writer.submit(disk.job(name))
    disk.go_on(2)
    assert writer.wait(WAIT_S) and disk.written == ["a", "d"]
    assert len(caplog.messages) == 2
    assert "run/b is not written, because writing a takes longer" in caplog.messages[0]
    assert "run/c is not written" in caplog.messages[1]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("broken")]
)
def test_an_error_is_a_warning_and_the_next_file_is_written(error, disk, caplog):
    writer = BackgroundWriter()
    disk.go_on(3)
    disk.error = error
    writer.submit(disk.job("a"))
    assert writer.wait(WAIT_S) and writer.has_failed
    assert f"run/a was not saved: {type(error).__name__}: {error}" in caplog.text
    disk.error = None
    writer.submit(disk.job("b"))
    assert writer.wait(WAIT_S) and not writer.has_failed
    writer.retry()  # b is newer than a
    assert writer.wait(WAIT_S) and disk.written == ["b"]


def test_a_failed_file_is_written_again(disk):
    writer = BackgroundWriter()
    disk.go_on(3)
    disk.error = OSError(5, "Input/output error")
    writer.submit(disk.job("a"))
    assert writer.wait(WAIT_S)
    writer.retry()
    assert writer.wait(WAIT_S) and writer.has_failed
    disk.error = None
    writer.retry()
    assert writer.wait(WAIT_S) and not writer.has_failed
    assert disk.written == ["a"]


def test_a_failed_file_is_not_kept_when_a_newer_one_waits(disk):
    writer = BackgroundWriter()
    writer.submit(disk.job("a"))
    disk.begun()
    writer.submit(disk.job("b"))
    disk.error = OSError(28, "No space left on device")
    disk.go_on()
    disk.begun()
    disk.error = None
    disk.go_on()
    assert writer.wait(WAIT_S) and not writer.has_failed
    assert disk.written == ["b"]


def test_no_thread_is_left(disk):
    writer = BackgroundWriter()
    disk.go_on()
    writer.submit(disk.job("a"))
    assert writer.wait(WAIT_S)
    for thread in threading.enumerate():
        if thread.name == "tfdist-checkpoint":
            thread.join(WAIT_S)
            assert not thread.is_alive()
