"""Spares get a smaller share of the CPUs: `tfdist.launch.cpu_share`."""

import errno
import os

import pytest

from tfdist.launch import cpu_share
from tfdist.launch.cpu_share import CpuShares


class Kernel:
    """Stands in for `os.write`: refuses as many changes as the test says."""

    def __init__(self, *errors):
        self.errors, self.write = [*errors], os.write

    def __call__(self, fd, data):
        if self.errors:
            raise OSError(self.errors.pop(0), "refused")
        return self.write(fd, data)


@pytest.fixture
def proc(tmp_path):
    for pid in (41, 42):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "autogroup").touch()
    return tmp_path


def nice(proc, pid):
    return (proc / str(pid) / "autogroup").read_text()


def test_a_value_that_is_refused_for_now_is_set_later(proc, monkeypatch):
    """Without privileges, Linux accepts ten changes a second."""
    monkeypatch.setattr(cpu_share.os, "write", Kernel(*[errno.EAGAIN] * 3))
    shares = CpuShares(proc)
    shares.set(41, 10)
    shares.set(42, 0)  # tries both
    assert nice(proc, 41) == ""
    shares.retry()
    assert (nice(proc, 41), nice(proc, 42)) == ("10", "0")
    (proc / "41" / "autogroup").write_text("")
    shares.retry()
    assert nice(proc, 41) == ""  # set once


def test_the_newest_value_counts(proc, monkeypatch):
    monkeypatch.setattr(cpu_share.os, "write", Kernel(errno.EAGAIN))
    shares = CpuShares(proc)
    shares.set(41, 10)
    shares.set(41, 0)
    assert nice(proc, 41) == "0"


def test_a_process_that_has_exited_is_forgotten(proc, monkeypatch):
    """Another process may get its number."""
    monkeypatch.setattr(cpu_share.os, "write", Kernel(errno.EAGAIN))
    shares = CpuShares(proc)
    shares.set(41, 10)
    shares.forget(41)
    shares.retry()
    assert nice(proc, 41) == ""


def test_without_autogroups_nothing_happens(proc, monkeypatch):
    shares = CpuShares(proc)
    shares.set(7, 10)  # no such process
    monkeypatch.setattr(cpu_share.os, "write", Kernel(errno.EPERM))
    shares.set(41, 10)
    shares.retry()
    assert nice(proc, 41) == ""
