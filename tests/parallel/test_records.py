"""The index of records over several ranks: one index, and errors on all of them."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.data import Records, _record_index, positions


@pytest.fixture
def files(tmp_path):
    """Seven files; file i has i % 3 + 1 records, the r-th of 100 * i + r bytes."""
    names = []
    for i in range(7):
        names.append(str(tmp_path / f"d-{i:05}-of-00007"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for r in range(i % 3 + 1):
                writer.write(bytes([i, r]) * (50 * i + r))
    return names


def contents():
    return [bytes([i, r]) * (50 * i + r) for i in range(7) for r in range(i % 3 + 1)]


def indexed(names, **options):
    """The records, and the files that this rank went through."""
    taken = []
    real = _record_index.index_file
    _record_index.index_file = lambda path: (taken.append(path), real(path))[1]
    try:
        return Records.from_tfrecords(names, **options), sorted(taken)
    finally:
        _record_index.index_file = real


def share(names):
    records, taken = indexed(names, counts=[1, 2, 3, 1, 2, 3, 1])
    assert taken == names[tfdist.rank() :: tfdist.size()]
    assert records.read(np.arange(13)).numpy().tolist() == contents()
    return [records.counts.tolist(), records._index.offsets.tolist()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_indexes_a_part_and_all_get_the_whole(files, size):
    alone = Records.from_tfrecords(files, together=False)
    expected = [alone.counts.tolist(), alone._index.offsets.tolist()]
    assert run_ranks(share, size, files) == [expected] * size


def epoch(names, first_step):
    records = Records.from_files(names)
    own = positions(
        len(records),
        global_batch=tfdist.size(),
        seed=1,
        epoch=0,
        first_step=first_step,
    )
    return [len(content) for content in records.read(own).numpy().ravel()]


def test_ranks_read_disjoint_samples_of_one_order(files):
    sizes = [Path(name).stat().st_size for name in files]
    by_rank = run_ranks(epoch, 3, files, 0)
    assert [len(own) for own in by_rank] == [2, 2, 2]
    seen = sum(by_rank, [])
    assert len(set(seen)) == 6 and set(seen) <= set(sizes)
    assert run_ranks(epoch, 3, files, 1) == [own[1:] for own in by_rank]


def told(call):
    """Class, message and culprit of the error; then the world goes on."""
    found = None
    try:
        call()
    except (TypeError, ValueError, OSError, tf.errors.OpError) as error:
        record = getattr(error, "record", None)
        found = [type(error).__name__, str(error), record and record.rank]
    assert tfdist.allgather_object(tfdist.rank()) == list(range(tfdist.size()))
    return found


def refused(names, options):
    return told(lambda: Records.from_tfrecords(names, **options))


def damage(name, kind):
    whole = Path(name).read_bytes()
    if kind == "missing":
        os.remove(name)
    elif kind == "cut off":
        os.truncate(name, len(whole) - 1)
    elif kind == "damaged":
        Path(name).write_bytes(b"\1" + whole[1:])


@pytest.mark.parametrize(
    ("kind", "own", "words"),
    [
        ("missing", "FileNotFoundError", "No such file"),
        ("cut off", "ValueError", "cut off"),
        ("damaged", "ValueError", "found something else or damage"),
        ("fewer", "ValueError", "expected 9 records (counts), found 2"),
    ],
)
def test_a_bad_file_of_one_ranks_part_is_an_error_on_all(files, kind, own, words):
    damage(files[4], kind)  # rank 1 of 3 goes through 1 and 4
    counts = [1, 2, 3, 1, 9 if kind == "fewer" else 2, 3, 1]
    answers = run_ranks(refused, 3, files, {"counts": counts})
    for rank, (name, message, culprit) in enumerate(answers):
        assert name == (own if rank == 1 else "RankFailedError")
        assert files[4] in message and words in message
        assert culprit == (None if rank == 1 else 1)


def refused_on_one(names, make):
    names = names[:-1] if make == "shorter" and tfdist.rank() == 1 else names
    names = names[::-1] if make == "other order" and tfdist.rank() == 1 else names
    if make == "other order":
        return told(lambda: Records.from_files(names))
    return told(lambda: Records.from_tfrecords(names))


def test_a_shard_that_one_host_lacks_is_an_error_on_all(files):
    for rank, (name, message, _) in enumerate(
        run_ranks(refused_on_one, 2, files, "shorter")
    ):
        assert name == ("ValueError" if rank == 1 else "RankFailedError")
        assert "Missing: " + files[6] in message


def test_lists_in_another_order_are_an_error_on_all(files):
    for name, message, _ in run_ranks(refused_on_one, 2, files, "other order"):
        assert name == "MismatchError"
        assert "Records.from_files differently: the list of files" in message
        for ends in ("d-00000-of-00007 to d-00006", "d-00006-of-00007 to d-00000"):
            assert f"7 files, {ends}" in message
        assert "sort names that come from a folder" in message


def cached_on_one(names, folder, owner):
    own = {"cache": f"{folder}/index.npz"} if tfdist.rank() == owner else {}
    return [len(indexed(names, **own)[1]) for _ in range(2)]


@pytest.mark.parametrize(("owner", "again"), [(0, 0), (1, 4)])
def test_the_cache_of_rank_0_alone_counts(files, tmp_path, owner, again):
    found = run_ranks(cached_on_one, 2, files, str(tmp_path), owner)
    assert found[0] == [4, again]
    assert bool(list(tmp_path.glob("*.npz"))) == (owner == 0)


def wrong_cache_on_one(names):
    return told(lambda: Records.from_tfrecords(names, cache=[None, 5][tfdist.rank()]))


def test_a_cache_that_is_no_name_is_an_error_on_all(files):
    for rank, (name, message, _) in enumerate(run_ranks(wrong_cache_on_one, 2, files)):
        assert name == ("TypeError" if rank == 1 else "RankFailedError")
        assert "not int" in message


def cached(names, folder):
    """Only rank 0 can see the cache."""
    cache = f"{folder}/rank{tfdist.rank()}.npz"
    answers = []
    for _ in range(2):
        records, taken = indexed(names, cache=cache)
        assert records.read(np.arange(13)).numpy().tolist() == contents()
        answers.append(len(taken))
    return answers


def test_the_first_rank_keeps_the_index_for_all(files, tmp_path):
    assert run_ranks(cached, 3, files, str(tmp_path)) == [[3, 0], [2, 0], [2, 0]]
    assert [p.name for p in tmp_path.glob("*.npz*")] == ["rank0.npz"]


def unwritable(names, folder):
    return refused(names, {"cache": f"{folder}/none/index.npz"})


def test_a_cache_that_cannot_be_written_is_an_error_on_all(files, tmp_path):
    for rank, (name, message, _) in enumerate(
        run_ranks(unwritable, 2, files, str(tmp_path))
    ):
        assert name == ("OSError" if rank == 0 else "RankFailedError")
        assert f"{tmp_path}/none/index.npz: the index cannot be written" in message


def alone(names):
    if tfdist.rank() == 1:
        return 0
    records, taken = indexed(names[1:4], together=False, all_shards=False)
    assert taken == names[1:4]
    return len(records)


def test_one_rank_may_have_files_of_its_own(files):
    assert run_ranks(alone, 2, files) == [6, 0]
