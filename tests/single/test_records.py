"""Records read by position: every byte of them right, or an error that says where."""

import concurrent.futures
import gzip
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.tf_ops.op_library import ops
from tfdist.data import Records, _record_index, epoch_order


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, records):
    with tf.io.TFRecordWriter(name) as writer:
        for record in records:
            writer.write(record)
    return name


def shards(sizes, stem="d"):
    """One file for each list of record sizes, and all records in order."""
    random = np.random.default_rng(1)
    contents = [[random.bytes(size) for size in part] for part in sizes]
    names = [
        write(f"{stem}-{i:05}-of-{len(sizes):05}", part)
        for i, part in enumerate(contents)
    ]
    return names, [record for part in contents for record in part]


SIZES = [[5, 0, 100_000, 23], [1], [70, 71, 72]]


def test_records_come_by_position_in_the_shape_asked_for():
    names, expected = shards(SIZES)
    assert list(tf.data.TFRecordDataset(names).as_numpy_iterator()) == expected
    records = Records.from_tfrecords(names, counts=[4, 1, 3])
    assert len(records) == 8
    assert records.files == tuple(names)
    assert records.counts.tolist() == [4, 1, 3]
    assert records.read(range(8)).numpy().tolist() == expected
    assert records.read(3).numpy() == expected[3]
    some = np.array([[7, 0], [2, 2], [4, 5]], np.int32)
    assert records.read(some).numpy().tolist() == [
        [expected[i] for i in row] for row in some
    ]
    assert records.read(np.zeros([0, 3], np.int64)).shape == (0, 3)


def test_a_pipeline_reads_in_the_order_of_the_epoch():
    names, expected = shards(SIZES)
    records = Records.from_tfrecords([Path(name).absolute() for name in names])
    order = epoch_order(8, seed=1, epoch=0)
    dataset = tf.data.Dataset.from_tensor_slices(order)
    for batched in (dataset, dataset.batch(3)):
        read = batched.map(records.read, num_parallel_calls=tf.data.AUTOTUNE)
        parts = [np.ravel(part).tolist() for part in read.as_numpy_iterator()]
        assert sum(parts, []) == [expected[i] for i in order]
        assert read.element_spec.shape.rank == batched.element_spec.shape.rank


def test_a_position_is_located():
    names, _ = shards(SIZES)
    records = Records.from_tfrecords(names)
    assert records.locate(0) == f"{names[0]}, record 0"
    assert records.locate(4) == f"{names[1]}, record 0"
    assert records.locate(7) == f"{names[2]}, record 2"
    assert Records.from_files(names).locate(1) == names[1]
    assert repr(records) == "<Records: 8 in 3 files>"
    for position in (-1, 8):
        with pytest.raises(IndexError, match=rf"0\.\.7, got {position}"):
            records.locate(position)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"0\.\.7, got {position}"
        ):
            records.read([0, position])
    with pytest.raises(TypeError, match="integer positions, got float32"):
        records.read([1.0])


def test_whole_files_are_records():
    contents = {"b.jpg": b"picture", "a.jpg": b"", "c.jpg": os.urandom(200_000)}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    records = Records.from_files([*contents, "none.jpg"])
    assert len(records) == 4
    assert records.counts.tolist() == [1, 1, 1, 1]
    assert records.read([2, 0, 1]).numpy().tolist() == [
        contents[name] for name in ("c.jpg", "b.jpg", "a.jpg")
    ]
    with pytest.raises(tf.errors.NotFoundError, match="none.jpg: cannot be read"):
        records.read([3])


def flips(name):
    """The file with each of its bytes changed in turn."""
    whole = Path(name).read_bytes()
    for i in range(len(whole)):
        changed = bytearray(whole)
        changed[i] ^= 0x20
        Path(name).write_bytes(bytes(changed))
        yield i


def test_no_changed_byte_passes():
    name = write("f.tfrecord", [b"first record", b"", b"third"])
    records = Records.from_tfrecords([name])
    places = []
    for i in flips(name):
        errors = []
        for read in (
            lambda: Records.from_tfrecords([name]),
            lambda: records.read([0, 1, 2]),
        ):
            try:
                read()
            except (ValueError, tf.errors.DataLossError) as error:
                assert "f.tfrecord" in str(error), error
                errors.append(type(error))
        assert errors, f"byte {i} was changed, nobody noticed"
        places.append(errors)
    # Headers when they are indexed, data and its checksum when they are read.
    assert places[:28] == [[ValueError]] * 12 + [[tf.errors.DataLossError]] * 16


def test_a_damaged_record_is_named():
    name = write("f.tfrecord", [b"first record", b"second"])
    records = Records.from_tfrecords([write("e.tfrecord", [b"x"]), name])
    whole = bytearray(Path(name).read_bytes())
    whole[45] ^= 1
    Path(name).write_bytes(bytes(whole))
    message = (
        r"f.tfrecord: record 1 \(position 2\): expected the checksum 0x\w{8} of the 6 "
        r"bytes at byte 40, found 0x\w{8}: the file is damaged"
    )
    assert records.read([1]).numpy() == [b"first record"]
    with pytest.raises(tf.errors.DataLossError, match=message):
        records.read([0, 1, 2])
    dataset = tf.data.Dataset.range(3).map(records.read)
    with pytest.raises(tf.errors.DataLossError, match=message):
        list(dataset)


def test_a_file_cut_off_anywhere_is_refused():
    name = write("f.tfrecord", [b"first record", b"second"])
    whole = Path(name).read_bytes()
    for size in range(len(whole)):
        Path(name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"^f\.tfrecord: .*expected .*found"):
            Records.from_tfrecords([name], counts=[2])
    for size, words in [
        (20, "record 0, at byte 0: expected 12 bytes of data and 4 of .*found 8 "),
        (33, "record 1, at byte 28: expected a header of 12 bytes, found 5 "),
        (0, "f.tfrecord: expected records, found an empty file"),
    ]:
        Path(name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=words):
            Records.from_tfrecords([name])


def test_a_file_cut_off_later_does_not_end_the_data_early():
    """OUT_OF_RANGE would be the end of the data to tf.data and to Keras."""
    name = write("f.tfrecord", [b"first record", b"second"])
    records = Records.from_tfrecords([name])
    os.truncate(name, 45)
    dataset = tf.data.Dataset.range(2).map(records.read)
    with pytest.raises(tf.errors.DataLossError, match="10 bytes at byte 40, found 5"):
        list(dataset)


def test_other_files_are_told_from_tfrecords():
    name = write("f.tfrecord", [b"x"])
    packed = gzip.compress(Path(name).read_bytes())
    Path("f.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="f.gz: .* compressed by gzip.*gunzip"):
        Records.from_tfrecords(["f.gz"])
    Path("f.zip").write_bytes(b"PK\3\4 and so on")
    with pytest.raises(ValueError, match="f.zip: expected a TFRecord file, found some"):
        Records.from_tfrecords(["f.zip"])
    with pytest.raises(FileNotFoundError, match="^none.tfrecord: cannot be read"):
        Records.from_tfrecords([name, "none.tfrecord"])
    with pytest.raises(OSError, match="^folder: cannot be read"):
        Path("folder").mkdir()
        Records.from_tfrecords(["folder"])


def test_the_files_of_a_split_are_complete():
    names, _ = shards([[1], [2], [3], [4], [5], [6]])
    assert len(Records.from_tfrecords(names)) == 6
    message = r"all 6 files of d-\*-of-00006, got 5. Missing: d-00002-of-00006. "
    with pytest.raises(ValueError, match=message):
        Records.from_tfrecords([n for n in names if n != names[2]])
    with pytest.raises(ValueError, match=r"got 1. .* d-00003-of-00006 and 2 more"):
        Records.from_tfrecords(names[:1])
    assert len(Records.from_tfrecords(names[:2], all_shards=False)) == 2
    others, _ = shards([[1], [2]])
    with pytest.raises(ValueError, match="different totals: -of-00002 and -of-00006"):
        Records.from_tfrecords(names + others)
    Path("d-00007-of-00002").write_bytes(Path(others[0]).read_bytes())
    with pytest.raises(ValueError, match="numbered from 0 to 1, got number 7. Remove"):
        Records.from_tfrecords([*others, "d-00007-of-00002"])
    more, _ = shards([[1], [2]], stem="e")  # the families are told apart
    assert len(Records.from_tfrecords(others + more)) == 4


def test_counts_are_compared():
    names, _ = shards([[1, 2], [], [3]])
    with pytest.raises(ValueError, match="d-00001-of-00003: .*found an empty file"):
        Records.from_tfrecords(names)
    records = Records.from_tfrecords(names, [2, 0, 1])
    assert [len(record) for record in records.read(range(3)).numpy()] == [1, 2, 3]
    assert records.locate(2) == f"{names[2]}, record 0"
    with pytest.raises(ValueError, match=r"d-00000-.*expected 3 records .*found 2"):
        Records.from_tfrecords(names, [3, 0, 1])
    with pytest.raises(ValueError, match="3 counts, one per file, got 2"):
        Records.from_tfrecords(names, [2, 1])
    with pytest.raises(ValueError, match="found none in 1 files"):
        Records.from_tfrecords(names[1:2], [0], all_shards=False)


@pytest.mark.parametrize("make", [Records.from_tfrecords, Records.from_files])
def test_lists_of_files_are_checked(make):
    with pytest.raises(TypeError, match=r"a single name, 'a\*'.*sorted\(tf.io.gfile"):
        make("a*")
    with pytest.raises(ValueError, match="at least one file"):
        make([])
    with pytest.raises(ValueError, match="got b twice"):
        make(["a", "b", "c", "b"])


def open_files():
    return len(os.listdir("/proc/self/fd"))


def read_op(records, positions, keep_open):
    return ops().tfdist_read_records(
        **records._tensors, positions=positions, whole_files=False, keep_open=keep_open
    )


@pytest.mark.parametrize("keep_open", [0, 1, 3, 100])
def test_few_files_stay_open_and_all_threads_read_right(keep_open):
    names, expected = shards([[10, 20]] * 12)
    records = Records.from_tfrecords(names)
    before = open_files()
    positions = np.random.default_rng(0).integers(0, 24, [8, 200])
    dataset = tf.data.Dataset.from_tensor_slices(positions).map(
        lambda p: read_op(records, p, keep_open), num_parallel_calls=8
    )
    iterator = iter(dataset)
    for row in positions:
        assert next(iterator).numpy().tolist() == [expected[i] for i in row]
    slack = 8  # other threads of TensorFlow open files too
    assert open_files() <= before + min(keep_open, 12) + slack
    if keep_open == 100:
        assert open_files() >= before + 12
    del iterator, dataset


def test_a_file_written_anew_is_read_anew():
    name = write("f.tfrecord", [b"old"])
    old = Records.from_tfrecords([name])
    assert old.read([0]).numpy() == [b"old"]
    os.remove(name)
    write(name, [b"new"])
    assert Records.from_tfrecords([name]).read([0]).numpy() == [b"new"]
    assert old.read([0]).numpy() == [b"new"]


def test_a_function_reads_when_it_runs_and_waits_for_nothing_else():
    name = write("f.tfrecord", [b"old", b"two"])
    records = Records.from_tfrecords([name])

    @tf.function
    def both():
        return records.read(0), records.read(1)

    nodes = both.get_concrete_function().graph.get_operations()
    readers = [node for node in nodes if node.type == "TfdistReadRecords"]
    assert len(readers) == 2
    assert not any(node.control_inputs for node in readers)
    assert [t.numpy() for t in both()] == [b"old", b"two"]
    new = Path(write("g.tfrecord", [b"new", b"two"])).read_bytes()
    with open(name, "r+b") as file:
        file.write(new)
    assert [t.numpy() for t in both()] == [b"new", b"two"]


def test_an_index_that_does_not_fit_is_refused():
    names, _ = shards([[1, 2]])
    tensors = Records.from_tfrecords(names)._tensors
    for name, value in [("first", [0, 1]), ("first", []), ("lengths", [1])]:
        wrong = {**tensors, name: tf.constant(value, tf.int64)}
        with pytest.raises(tf.errors.InvalidArgumentError, match="to be an index of"):
            ops().tfdist_read_records(
                **wrong, positions=[0], whole_files=False, keep_open=0
            )


class Counter:
    """Counts the files that are indexed."""

    def __init__(self, monkeypatch):
        self.files = []
        real = _record_index.index_file
        monkeypatch.setattr(
            _record_index, "index_file", lambda p: (self.files.append(p), real(p))[1]
        )

    def take(self):
        files, self.files = self.files, []
        return files


def test_a_second_start_takes_the_index_that_was_kept(monkeypatch, caplog):
    names, expected = shards(SIZES)
    counter = Counter(monkeypatch)
    cache = Path("index.npz")

    def start(**options):
        records = Records.from_tfrecords(names, cache=cache, **options)
        assert records.read(range(8)).numpy().tolist() == expected
        return sorted(counter.take())

    assert start() == names
    assert start() == []
    with pytest.raises(ValueError, match="expected 2 records .counts., found 1"):
        start(counts=[4, 2, 3])
    # Other files, or changed ones.
    os.utime(names[1], ns=(1, 1))
    assert start() == names
    assert start() == []
    part = Records.from_tfrecords(names[:2], cache=cache, all_shards=False)
    assert len(part) == 5
    assert counter.take() == names[:2]
    assert start() == names
    # Content that is no index.
    good = cache.read_bytes()
    at = good.rindex(b"counts.npy") - 46 + 10  # the method of compression
    damaged = good[:at] + b"\x63" + good[at + 1 :]
    for content in (b"", good[:300], damaged, good[:-9]):
        cache.write_bytes(content)
        caplog.clear()
        assert start() == names
        assert "index.npz: expected an index" in caplog.text
    assert start() == []
    assert [p.name for p in Path().iterdir() if "npz" in p.name] == ["index.npz"]


@pytest.mark.parametrize("kind", ["npz", "npy", "zip", "tfrecord"])
def test_another_file_is_not_written_over_by_the_index(kind):
    names, _ = shards(SIZES)
    name = f"mine.{kind}"
    if kind == "npz":
        np.savez(name, features=np.arange(3))
    elif kind == "npy":
        np.save(name, np.arange(3))
    elif kind == "zip":
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("a.txt", "mine")
    else:
        Path(name).write_bytes(Path(names[0]).read_bytes())
    before = Path(name).read_bytes()
    with pytest.raises(ValueError, match=rf"mine.{kind}: expected .* name as cache="):
        Records.from_tfrecords(names, cache=name)
    assert Path(name).read_bytes() == before


def test_names_of_files_may_be_bytes_and_must_be_utf_8():
    names, _ = shards(SIZES)
    records = Records.from_tfrecords([name.encode() for name in names])
    assert len(records) == len(Records.from_tfrecords(names))
    with pytest.raises(ValueError, match=r"in UTF-8, got 'a\\udcff'"):
        Records.from_files([b"a\xff"])


def test_an_index_that_cannot_be_the_one_of_the_files_is_not_taken(monkeypatch):
    names, _ = shards(SIZES)
    counter = Counter(monkeypatch)
    Records.from_tfrecords(names, cache="index.npz")
    with np.load("index.npz") as kept:
        arrays = dict(kept)
    arrays["lengths"][3] += 1
    np.savez("index.npz", **arrays)
    counter.take()
    Records.from_tfrecords(names, cache="index.npz")
    assert sorted(counter.take()) == names


def test_a_place_where_nothing_can_be_kept_is_an_error():
    names, _ = shards(SIZES)
    with pytest.raises(OSError, match=r"^none/index.npz: the index cannot be written"):
        Records.from_tfrecords(names, cache="none/index.npz")
    assert not Path("none").exists()
    with pytest.raises(FileNotFoundError, match="gone.tfrecord"):
        Records.from_tfrecords(["gone.tfrecord"], cache="index.npz")


def test_the_first_bad_file_of_the_list_is_named_whichever_is_found_first():
    names, _ = shards([[1]] * 40)
    for bad in (30, 7, 20):
        Path(names[bad]).write_bytes(b"bad")
    for _ in range(3):
        with pytest.raises(ValueError, match=re.escape(names[7])):
            Records.from_tfrecords(names)


def test_several_threads_may_index_at_once():
    names, _ = shards(SIZES)
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        made = list(executor.map(lambda _: Records.from_tfrecords(names), range(8)))
    assert {tuple(records.counts) for records in made} == {(4, 1, 3)}
