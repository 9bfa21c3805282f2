"""Open files of a rank: raised when they do not suffice, or an error with numbers."""

import os
import resource

import pytest

from tfdist.core.rendezvous import open_files, overlay
from tfdist.core.rendezvous.errors import RendezvousError


@pytest.fixture
def limit(monkeypatch):
    """The limit of a pretended process; a list, so that a test can change it."""
    values = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(values))

    def change(kind, new):
        assert kind == resource.RLIMIT_NOFILE
        values[:] = new

    monkeypatch.setattr(resource, "setrlimit", change)
    return values


def test_a_limit_that_suffices_stays(limit):
    open_files.raise_limit(15)
    assert limit == [1024, 4096]


def test_the_soft_limit_is_raised_to_the_hard_one(limit):
    open_files.raise_limit(900)  # 3,600 files, beside those that pytest has open
    assert limit == [4096, 4096]


def test_links_that_may_follow_raise_it_as_far_as_it_goes(limit):
    open_files.raise_limit(15, later=100)
    assert limit == [1024, 4096]
    open_files.raise_limit(15, 16, later=2000)
    assert limit == [4096, 4096]


def test_a_hard_limit_that_is_too_low_is_an_error_with_both_numbers(limit):
    with pytest.raises(RendezvousError) as error:
        open_files.raise_limit(2000)
    others = len(os.listdir("/proc/self/fd")) + 64
    assert f"2000 links need {others + 4 * 2000} open files" in str(error.value)
    assert "the limit of this process is 4096" in str(error.value)
    assert "ulimit -Hn" in str(error.value)
    assert limit == [1024, 4096]


@pytest.mark.parametrize("size", [2, 3, 16, 17, 24, 100, 256])
def test_neighbours_are_mutual_and_few(size):
    for rank in range(size):
        own = overlay.neighbours(rank, size)
        assert own == sorted(set(own) - {rank})
        assert len(own) <= 2 * (size - 1).bit_length()
        assert all(rank in overlay.neighbours(other, size) for other in own)


def test_a_small_world_is_a_full_mesh():
    assert overlay.first_peers(3, 16, 16) == [r for r in range(16) if r != 3]
    assert overlay.first_peers(3, 17, 16) == overlay.neighbours(3, 17)
