"""horovod.data: loaders that read ahead."""

import logging
import threading
import time

import pytest

from tfdist.horovod.data import (
    AsyncDataLoaderMixin,
    BaseDataLoader,
    data_loader_base,
)


class Numbers(BaseDataLoader):
    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.threads, self.read = set(), 0

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            self.threads.add(threading.get_ident())
            if number == self.fails_at:
                raise OSError(f"cannot read {number}")
            self.read += 1
            yield number

    def _process_batch(self, batch):
        return batch * 10


class ReadAhead(AsyncDataLoaderMixin, Numbers):
    pass


def threads():
    return [t for t in threading.enumerate() if t.name == "tfdist-reads-ahead"]


@pytest.mark.parametrize("size", [0, 1, 64])
def test_every_pass_gives_all_batches_in_order(size):
    loader = ReadAhead(size, False, 5)
    assert [list(loader), list(loader), len(loader)] == [[0, 10, 20, 30, 40]] * 2 + [5]
    own = threading.get_ident()
    assert loader.threads == {own} if size == 0 else own not in loader.threads
    assert threads() == []


def test_it_reads_no_further_ahead_than_told_and_ends_with_the_pass():
    loader = ReadAhead(3, False, 1000)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 10]
    assert loader.read <= 2 + 3 + 1
    loader.close_async_loader()
    assert threads() == [] and list(batches) == []
    for number in loader:
        if number == 20:
            break
    assert threads() == []


def test_a_slow_side_is_waited_for(monkeypatch):
    monkeypatch.setattr(data_loader_base, "_LOOK_S", 0.001)

    class Slow(ReadAhead):
        def _iterate(self):
            for number in super()._iterate():
                time.sleep(0.02)
                yield number

    assert list(Slow(1, False, 3)) == [0, 10, 20]
    found = []
    for number in ReadAhead(1, False, 5):
        time.sleep(0.02)
        found.append(number)
    assert found == [0, 10, 20, 30, 40]


def test_what_reading_raises_is_raised_where_the_batches_are_taken():
    taken = []
    with pytest.raises(OSError, match="cannot read 2"):
        taken.extend(number for number in ReadAhead(8, False, 5, fails_at=2))
    loader = ReadAhead(8, False, 5, fails_at=2)
    with pytest.raises(OSError):
        for number in loader:
            taken.append(number)
    assert taken[-2:] == [0, 10] and threads() == []


def test_batches_are_logged_when_asked_for(caplog):
    with caplog.at_level(logging.INFO, "tfdist"):
        assert list(ReadAhead(2, True, 2)) == [0, 10]
    assert [r.message for r in caplog.records] == [
        "batch 0 was read",
        "batch 1 was read",
    ]


def test_wrong_sizes_and_loaders_without_their_methods_are_errors():
    with pytest.raises(ValueError, match="async_loader_queue_size"):
        ReadAhead(-1, False, 5)
    with pytest.raises(NotImplementedError, match="__len__"):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError, match="_iterate"):
        next(iter(BaseDataLoader()))
