"""The made tars: same bytes, the shape of the real ones, read by the real builder."""

import collections
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import pictures
from helpers.pictures import make_tiny_imagenet as maker
from helpers.pictures import prepare_imagenet as preparer
from PIL import Image

TRAIN, VALIDATION = preparer.TARS
SMALL = {"train": 20, "validation": 7, "size": 32}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Both tars; nobody may write to the folder."""
    return pictures.tars(tmp_path_factory.mktemp("small"), **SMALL)


@pytest.fixture
def tars(small, tmp_path):
    """Copies of both."""
    return Path(shutil.copytree(small, tmp_path / "tars"))


def members(path):
    """Name → content of each regular file."""
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}


def train_members(path):
    """Name of the picture → its class tar, and its bytes."""
    found = {}
    for name, content in members(path).items():
        for picture, jpeg in members_of_bytes(content).items():
            found[picture] = (name, jpeg)
    return found


def members_of_bytes(content):
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}


def digit_of(jpeg):
    """What was drawn."""
    return int(Image.open(io.BytesIO(jpeg)).info["comment"].removeprefix(b"digit "))


def test_the_same_flags_give_the_same_bytes(small, tmp_path):
    again = pictures.tars(tmp_path / "again", **SMALL)
    other = pictures.tars(tmp_path / "other", **SMALL, seed=2)
    for name in (TRAIN, VALIDATION):
        first = (small / name).read_bytes()
        assert (again / name).read_bytes() == first
        assert (other / name).read_bytes() != first


def test_more_pictures_begin_with_the_fewer(small, tmp_path):
    more = pictures.tars(tmp_path, train=30, validation=9, size=32)
    few, many = train_members(small / TRAIN), train_members(more / TRAIN)
    assert few.items() < many.items()
    assert members(small / VALIDATION).items() < members(more / VALIDATION).items()


def test_the_training_tar_has_a_tar_for_each_class(small):
    found = train_members(small / TRAIN)
    of_class = collections.Counter(tar for tar, _ in found.values())
    assert sorted(of_class.values()) == [2] * 10
    assert list(of_class) == sorted(of_class)
    for picture, (tar, _) in found.items():
        assert re.fullmatch(r"n\d{8}\.tar", tar)
        assert re.fullmatch(tar[:-4] + r"_\d+\.JPEG", picture)


def test_pictures_have_many_shapes_and_the_size_asked_for(tmp_path):
    folder = pictures.tars(tmp_path, train=60, validation=1, size=40)
    sizes = [
        Image.open(io.BytesIO(jpeg)).size
        for _, jpeg in train_members(folder / TRAIN).values()
    ]
    assert {min(size) for size in sizes} == {40}
    assert max(max(size) for size in sizes) <= 60
    assert len({max(size) for size in sizes}) > 10
    upright = sum(width < height for width, height in sizes)
    assert 10 < upright < 50


def test_the_validation_tar_counts_as_the_real_one(small):
    pictured = members(small / VALIDATION)
    assert len(pictured) == SMALL["validation"]
    with tarfile.open(small / VALIDATION) as tar:
        names = sorted(tar.getnames())
        others = [m for m in tar if m.name not in pictured]
    for number, name in enumerate(names, start=1):
        suffix = ".JPEG" if name in pictured else ""
        assert name == f"ILSVRC2012_val_{number:08d}{suffix}"
    assert all(m.isdir() for m in others)


def test_all_500_validation_pictures_can_be_had():
    path = maker.file_of("tensorflow_datasets", maker.LABELS)
    labels = path.read_text().split()
    classes = maker.choose_classes(labels)
    found = list(maker.validation_members(labels, classes, 500))
    digits = collections.Counter(digit for _, digit in found)
    assert [digits[d] for d in range(10)] == [50] * 10
    assert found[-1][1] is not None


def test_the_real_builder_gives_each_picture_the_label_of_its_digit(tiny_imagenet):
    classes = pictures.synsets()
    digits = {}
    for split, count in (("train", 200), ("validation", 50)):
        found = pictures.examples(tiny_imagenet, split)
        assert len(found) == count
        for one in found:
            assert one.digit == digit_of(one.jpeg)
            assert digits.setdefault(one.label, one.digit) == one.digit
            if split == "train":
                assert one.name.startswith(classes[one.label])
    assert sorted(digits.values()) == list(range(10))
    # Labels rise with digits: both follow the sorted classes.
    assert [digits[label] for label in sorted(digits)] == list(range(10))


def test_digits_to_validate_with_are_not_those_to_train_on():
    split = maker.TRAIN_DIGITS
    assert all(len(drawings) == 500 for drawings in maker.load_digits())
    for digit, drawings in enumerate(maker.load_digits()):
        trained = {row.tobytes() for row in drawings[:split]}
        tested = {row.tobytes() for row in drawings[split:]}
        assert not trained & tested, digit


def test_the_other_forms_have_the_same_pictures_in_the_same_order(
    tiny_imagenet, tmp_path
):
    import tensorflow as tf

    records = pictures.as_classic_tfrecords(tiny_imagenet, tmp_path / "r", shards=3)
    folders = pictures.as_folders(tiny_imagenet, tmp_path / "f")
    for split in pictures.SPLITS:
        expected = pictures.examples(tiny_imagenet, split)
        files = sorted(records.glob(f"{split}-*-of-00003"))
        assert len(files) == 3
        found = []
        for record in tf.data.TFRecordDataset(list(map(str, files))):
            feature = tf.train.Example.FromString(record.numpy()).features.feature
            jpeg = feature["image/encoded"].bytes_list.value[0]
            label = feature["image/class/label"].int64_list.value[0]
            name = feature["image/filename"].bytes_list.value[0].decode()
            found.append(pictures.Example(name, jpeg, label - 1))
        assert found == expected
        classes = sorted(path.name for path in (folders / split).iterdir())
        assert len(classes) == 1000
        paths = sorted((folders / split).rglob("*.JPEG"), key=lambda path: path.name)
        assert [
            (path.name.split("_", 1)[1], path.read_bytes(), path.parent.name)
            for path in paths
        ] == [(one.name, one.jpeg, classes[one.label]) for one in expected]


PREPARE_OFFLINE = """
import socket, sys
def refuse(*arguments):
    raise AssertionError(f"a connection: {arguments[1:]}")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])
import prepare_imagenet
builder = prepare_imagenet.prepare(sys.argv[2], sys.argv[3])
print(builder.info.splits["train"].num_examples)
"""


@pytest.mark.slow
def test_nothing_leaves_the_machine(small, tmp_path):
    """Python's sockets refuse; TensorFlow's own are watched where strace is."""
    command = [sys.executable, "-c", PREPARE_OFFLINE, str(pictures.RECIPES)]
    command += [str(small), str(tmp_path / "data")]
    trace = tmp_path / "trace"
    strace = shutil.which("strace")
    if strace:
        watch = ["-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace)]
        command = [strace, *watch, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "20"
    if strace:
        assert "AF_INET" not in trace.read_text()


# Errors in the arguments, or in the tars.


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"train": 9}, "--train to be at least 10, one for each digit, got 9"),
        ({"validation": 501}, "--validation to be 1 to 500, got 501"),
        ({"validation": 0}, "--validation to be 1 to 500, got 0"),
        ({"size": 31}, "--size to be 32 to 4096 pixels, got 31"),
        ({"digit": 0.9}, "--digit to be 0.1 to 0.875, got 0.9"),
        ({"photograph": 1.5}, "--photograph to be 0 to 1, got 1.5"),
        ({"seed": -1}, "--seed to be 0 or more, got -1"),
    ],
)
def test_a_number_out_of_its_range_is_named(asked, words):
    with pytest.raises(ValueError, match=words):
        maker.Pictures(**asked)


def test_tars_that_are_there_are_not_touched(tars):
    (tars / TRAIN).unlink()
    before = (tars / VALIDATION).read_bytes()
    with pytest.raises(FileExistsError, match=f"{VALIDATION} exists"):
        pictures.tars(tars)
    assert os.listdir(tars) == [VALIDATION]
    assert (tars / VALIDATION).read_bytes() == before


def test_nothing_half_written_has_the_name_of_a_tar(tmp_path, monkeypatch):
    def draw(self, digit, number, train):
        if not train:
            raise MemoryError
        return b"jpeg"

    monkeypatch.setattr(maker.Artist, "draw", draw)
    with pytest.raises(MemoryError):
        pictures.tars(tmp_path)
    assert os.listdir(tmp_path) == [TRAIN]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no-deps scikit-learn"):
        maker.file_of("sklearn", "datasets/images/china.jpg")


def test_missing_tars_are_named_with_what_is_there(tars):
    (tars / VALIDATION).rename(tars / "val.tar")
    with pytest.raises(FileNotFoundError) as raised:
        preparer.check_tars(tars)
    assert f"Expected {VALIDATION} in {tars}" in str(raised.value)
    assert f"found ['{TRAIN}', 'val.tar']" in str(raised.value)
    with pytest.raises(FileNotFoundError, match="found no such folder"):
        preparer.check_tars(tars / "nowhere")


def test_good_tars_pass(tars):
    preparer.check_tars(tars)


@pytest.mark.parametrize("name", [TRAIN, VALIDATION])
@pytest.mark.parametrize("part", [0.3, 0.7])
def test_a_tar_that_was_cut_short_is_named(tars, name, part):
    size = (tars / name).stat().st_size
    for kept in (int(size * part), int(size * part) // 512 * 512):
        os.truncate(tars / name, kept)
        with pytest.raises(ValueError, match=f"{name}, {kept:,} bytes"):
            preparer.check_tars(tars)


def test_a_tar_cut_between_two_members_is_named(tars):
    with tarfile.open(tars / VALIDATION) as tar:
        middle = tar.getmembers()[100].offset
    os.truncate(tars / VALIDATION, middle)
    with tarfile.open(tars / VALIDATION) as tar:  # Python sees nothing wrong
        assert len(tar.getnames()) == 100
    with pytest.raises(ValueError, match="truncated"):
        preparer.check_tars(tars)


def pack(path, contents):
    """A tar of the given members, in order."""
    with path.open("wb") as file, maker.open_tar(file) as tar:
        for name, content in contents.items():
            maker.add(tar, name, content)


def test_a_class_tar_that_was_cut_short_is_named(tars):
    contents = members(tars / TRAIN)
    third = sorted(contents)[3]
    contents[third] = contents[third][:2048]
    pack(tars / TRAIN, contents)
    with pytest.raises(ValueError, match=f"its member {third}.*is truncated"):
        preparer.check_tars(tars)


def test_a_tar_of_folders_instead_of_class_tars_is_refused(tars):
    pack(tars / TRAIN, {"n01440764": None, "n01440764/n01440764_1.JPEG": b""})
    with pytest.raises(ValueError, match="got 'n01440764'"):
        preparer.check_tars(tars)


@pytest.mark.parametrize(
    ("contents", "place", "got"),
    [
        ({"val": None, "val/ILSVRC2012_val_00000001.JPEG": b"j"}, 1, "val"),
        (
            {f"ILSVRC2012_val_{n:08d}.JPEG": b"j" for n in (1, 2, 4)},
            3,
            "ILSVRC2012_val_00000004.JPEG",
        ),
    ],
)
def test_names_that_would_shift_the_labels_are_refused(tars, contents, place, got):
    pack(tars / VALIDATION, contents)
    words = f"ILSVRC2012_val_{place:08d}.JPEG as name {place} .* got '{got}'"
    with pytest.raises(ValueError, match=words):
        preparer.check_tars(tars)


def test_no_tar_is_needed_where_all_is_prepared(tiny_imagenet, tmp_path):
    builder = preparer.prepare(tmp_path / "nothing", tiny_imagenet)
    assert builder.info.splits["validation"].shard_lengths == [17, 16, 17]


def test_a_missing_package_of_the_builder_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "importlib_resources", None)
    with pytest.raises(ImportError, match="pip install tensorflow-datasets importlib_"):
        preparer.import_tfds()


def run_tool(name, *arguments, **environ):
    return subprocess.run(
        [sys.executable, str(pictures.RECIPES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environ},
    )


def test_the_command_says_what_it_wrote(tmp_path):
    done = run_tool(
        *("make_tiny_imagenet.py", f"--out={tmp_path}"),
        *("--train=10", "--validation=1", "--size=32"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"10 pictures in {tmp_path / TRAIN}"
    assert lines[1] == f"1 pictures in {tmp_path / VALIDATION}"
    assert len(re.findall(r"n\d{8}", lines[2])) == 10
    again = run_tool("make_tiny_imagenet.py", f"--out={tmp_path}")
    assert again.returncode == 1
    assert again.stderr.startswith(f"make_tiny_imagenet: {tmp_path / TRAIN} exists")


def test_prepare_is_for_one_process(tmp_path):
    flags = [f"--manual_dir={tmp_path}", f"--data_dir={tmp_path}"]
    done = run_tool("prepare_imagenet.py", *flags, TFDIST_SIZE="2")
    assert done.returncode == 1
    assert "expected one process" in done.stderr
