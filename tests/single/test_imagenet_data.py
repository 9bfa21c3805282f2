"""Batches of recipes/imagenet_data.py: the same of every format and number of ranks."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import pictures

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import imagenet_data  # noqa: E402

SLOW = pytest.mark.slow
EXAMPLES, HELD_OUT, CLASSES = 200, 50, 1000
SMALL = {"image_size": 32, "threads": 2}


@pytest.fixture(scope="module")
def stored(tiny_imagenet, tmp_path_factory):
    """The same pictures in each format: where they are, and their options."""
    folder = tmp_path_factory.mktemp("formats")
    classic = pictures.as_classic_tfrecords(tiny_imagenet, folder / "tfrecord")
    folders = pictures.as_folders(tiny_imagenet, folder / "folder")
    return {
        "tfds": (tiny_imagenet, {}),
        "tfrecord": (classic, {"label_offset": 1}),
        "folder": (folders, {}),
    }


@pytest.fixture(scope="module")
def train(stored):
    return imagenet_data.open_split("tfds", stored["tfds"][0], "train")


@pytest.fixture(scope="module")
def held_out(stored):
    return imagenet_data.open_split("tfds", stored["tfds"][0], "validation")


@pytest.fixture(scope="module")
def whole(train):
    """What one rank has in 18 steps of 24 samples; an epoch has 8 such steps."""
    return arrays(training(train, last=18))


def arrays(batches):
    """[images, labels, ...] of all batches, one after the other."""
    columns = zip(*batches.as_numpy_iterator(), strict=True)
    return [np.concatenate(column) for column in columns]


def training(split, rank=0, size=1, first=0, last=10, batch=24, **options):
    return split.training_batches(
        **{"first_step": first, "last_step": last, "global_batch": batch},
        **{"rank": rank, "size": size, "seed": 3} | SMALL | options,
    )


def validation(split, rank=0, size=1, batch=16, **options):
    return split.validation_batches(
        batch=batch, rank=rank, size=size, **SMALL | options
    )


@pytest.mark.parametrize("data_format", ["tfrecord", "folder"])
def test_formats_give_the_same_batches(stored, whole, held_out, data_format):
    place, options = stored[data_format]
    split = imagenet_data.open_split(data_format, place, "train", **options)
    assert len(split) == EXAMPLES
    for found, expected in zip(arrays(training(split, last=3)), whole, strict=True):
        np.testing.assert_array_equal(found, expected[: 3 * 24])
    split = imagenet_data.open_split(data_format, place, "validation", **options)
    for found, expected in zip(
        *(arrays(validation(one)) for one in (split, held_out)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_batches_are_what_the_network_takes(train):
    batches = training(train, last=3)
    images, labels = batches.element_spec
    assert (images.shape, images.dtype) == ((24, 32, 32, 3), tf.uint8)
    assert (labels.shape, labels.dtype) == ((24, CLASSES), tf.float32)
    assert batches.cardinality() == 3
    _, labels = arrays(batches)
    np.testing.assert_array_equal(labels.sum(axis=1), 1)
    weighted = training(train, last=3, skip_corrupt=True)
    assert arrays(weighted)[2].tolist() == [1.0] * 72


@pytest.mark.parametrize(
    ("size", "accumulation"),
    [(2, 2), *(pytest.param(*case, marks=SLOW) for case in ((4, 1), (3, 2)))],
)
def test_a_step_has_the_same_samples_for_any_number_of_ranks(
    train, whole, size, accumulation
):
    options = {"last": 2, "accumulation": accumulation}
    ranks = [arrays(training(train, r, size, **options)) for r in range(size)]
    for expected, *parts in zip(whole, *ranks, strict=True):
        by_step = [part.reshape(2, 24 // size, *part.shape[1:]) for part in parts]
        found = np.concatenate(by_step, axis=1).reshape(-1, *expected.shape[1:])
        np.testing.assert_array_equal(found, expected[:48])


@pytest.mark.parametrize(
    ("first", "last"),
    [(7, 10), *(pytest.param(*part, marks=SLOW) for part in ((2, 5), (8, 18)))],
)
def test_a_run_goes_on_at_any_step_with_other_ranks(train, whole, first, last):
    ranks = [arrays(training(train, r, 2, first, last)) for r in range(2)]
    for expected, *parts in zip(whole, *ranks, strict=True):
        by_step = [part.reshape(last - first, 12, *part.shape[1:]) for part in parts]
        found = np.concatenate(by_step, axis=1).reshape(-1, *expected.shape[1:])
        np.testing.assert_array_equal(found, expected[first * 24 : last * 24])


def test_an_epoch_has_every_sample_once_each_with_its_own_crop(held_out):
    _, labels = arrays(validation(held_out))
    images, trained = arrays(training(held_out, last=4, batch=25))
    for epoch in range(2):
        part = trained[50 * epoch : 50 * (epoch + 1)]
        np.testing.assert_array_equal(part.sum(axis=0), labels.sum(axis=0))
    assert not np.array_equal(trained[:50], trained[50:])  # another order
    assert len({image.tobytes() for image in images}) == 100


def test_the_same_bits_with_any_number_of_threads(train, whole):
    found = arrays(training(train, last=3, threads=5))
    for again, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(again, expected[:72])


@pytest.mark.parametrize("size", [1, 3])
def test_validation_has_each_example_once(tiny_imagenet, held_out, size):
    shares = [validation(held_out, r, size) for r in range(size)]
    found = [[y for _, y in share.as_numpy_iterator()] for share in shares]
    for share, parts in zip(shares, found, strict=True):
        sizes = [len(part) for part in parts]
        assert share.cardinality() == len(parts)
        assert all(part == 16 for part in sizes[:-1]) and 1 <= sizes[-1] <= 16
    labels = [int(one) for parts in found for part in parts for one in part.argmax(1)]
    expected = pictures.examples(tiny_imagenet, "validation")
    assert labels == [one.label for one in expected]


def test_synthetic_data_are_as_many_as_imagenet_has():
    split = imagenet_data.open_split("synthetic", None, "train")
    assert len(split) // 256 == 5004
    assert len(arrays(training(split, first=5003, last=5005))[0]) == 48


def test_synthetic_pictures_are_the_same_in_every_epoch():
    split = imagenet_data.open_split("synthetic", None, "train", examples=24, seed=1)
    images, labels = arrays(training(split, last=2, image_size=33))
    first, second = (
        images[part][np.lexsort(images[part].reshape(24, -1).T)]
        for part in (slice(0, 24), slice(24, 48))
    )
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(labels.argmax(axis=1))) > 12
    assert 120 < images.mean() < 135


# ------------------------------------------------------------------------ damaged data


def damaged_folder(stored, tmp_path, positions):
    """The folders with a few pictures of `train` cut off."""
    shutil.copytree(stored["folder"][0], tmp_path / "copy")
    files = sorted((tmp_path / "copy" / "train").glob("*/*"), key=lambda f: f.name)
    for position in positions:
        content = files[position].read_bytes()
        files[position].write_bytes(content[: len(content) // 3])
    return tmp_path / "copy", files


def test_a_damaged_picture_is_an_error_that_names_its_file(stored, tmp_path):
    folder, files = damaged_folder(stored, tmp_path, [17])
    split = imagenet_data.open_split("folder", folder, "train")
    assert split.failure is None
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        arrays(training(split, last=8, batch=25))
    assert files[17].name in str(caught.value)
    assert split.failure.startswith(f"{files[17]}: expected a record with a whole")
    assert "--skip_corrupt" in split.failure


def test_damaged_pictures_are_left_out_and_counted(stored, tmp_path, train):
    positions = [17, 18, 150]
    folder, files = damaged_folder(stored, tmp_path, positions)
    skipped = {}
    options = {"last": 4, "batch": 100}
    undamaged = arrays(training(train, **options))
    for rank in range(2):
        split = imagenet_data.open_split("folder", folder, "train")
        *pair, weights = arrays(training(split, rank, 2, **options, skip_corrupt=True))
        good = weights == 1
        for found, whole in zip(pair, undamaged, strict=True):
            by_rank = whole.reshape(4, 2, 50, *whole.shape[1:])
            expected = by_rank[:, rank].reshape(found.shape)
            np.testing.assert_array_equal(found[good], expected[good])
            assert not found[~good].any()
        assert (~good).sum() == split.skipped.total()
        for position, times in split.skipped.items():
            skipped[position] = skipped.get(position, 0) + times
            assert split.locate(position) == str(files[position])
    assert skipped == dict.fromkeys(positions, 2)  # two epochs


@pytest.mark.slow
def test_validation_leaves_damaged_pictures_out_too(stored, tmp_path):
    shutil.copytree(stored["folder"][0], tmp_path / "copy")
    file = min((tmp_path / "copy/validation").glob("*/*"), key=lambda f: f.name)
    file.write_bytes(b"no picture")
    split = imagenet_data.open_split("folder", tmp_path / "copy", "validation")
    with pytest.raises(tf.errors.InvalidArgumentError, match=file.name):
        arrays(validation(split))
    assert arrays(validation(split, skip_corrupt=True))[2].tolist() == [0.0] + [1] * 49
    assert dict(split.skipped) == {0: 1}


def test_a_damaged_record_is_named_or_left_out(stored, tmp_path):
    shutil.copytree(stored["tfrecord"][0], tmp_path / "copy")
    file = tmp_path / "copy" / "train-00001-of-00004"
    content = bytearray(file.read_bytes())
    content[100] ^= 1  # in the first record
    file.write_bytes(content)
    split = imagenet_data.open_split(
        "tfrecord", tmp_path / "copy", "train", label_offset=1
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{file}, record 0"):
        arrays(training(split, last=8, batch=25))
    batches = training(split, last=8, batch=25, skip_corrupt=True)
    assert arrays(batches)[2].sum() == EXAMPLES - 1
    assert dict(split.skipped) == {50: 1}


def test_a_file_that_is_gone_is_an_error_even_when_damaged_ones_are_left_out(
    stored, tmp_path
):
    folder, files = damaged_folder(stored, tmp_path, [])
    split = imagenet_data.open_split("folder", folder, "train")
    files[5].unlink()
    with pytest.raises(tf.errors.OpError, match=files[5].name):
        arrays(training(split, last=8, batch=25, skip_corrupt=True))
    assert not split.skipped


def test_an_example_that_is_good_again_is_not_counted_as_damaged(stored):
    split = imagenet_data.open_split("folder", stored["folder"][0], "train")

    def picture(encoded, position, key):
        return imagenet_data.imagenet_pictures.validation_picture(encoded, 32)

    with pytest.raises(ValueError, match="failed twice, but can be used now"):
        split._examples.explain(np.int64(3), np.int64(0), picture, True)
    assert not split.skipped


# ----------------------------------------------------------------------------- errors


def classic(stored, tmp_path, labels, **options):
    """Opens TFRecord files of the given labels, one picture each."""
    encoded = pictures.examples(stored["tfds"][0], "train")[0].jpeg
    for shard, part in enumerate(np.array_split(labels, 2)):
        path = str(tmp_path / f"train-{shard:05d}-of-00002")
        with tf.io.TFRecordWriter(path) as writer:
            for label in part:
                bytes_list = tf.train.BytesList(value=[encoded])
                int64_list = tf.train.Int64List(value=[int(label)])
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=bytes_list),
                    "image/class/label": tf.train.Feature(int64_list=int64_list),
                }
                features = tf.train.Features(feature=feature)
                writer.write(tf.train.Example(features=features).SerializeToString())
    return imagenet_data.open_split("tfrecord", tmp_path, "train", **options)


def test_labels_that_count_from_1_are_recognised(stored, tmp_path):
    labels = np.arange(20) % 10 + 1
    with pytest.raises(ValueError) as caught:
        classic(stored, tmp_path, labels, classes=10)
    file = tmp_path / "train-00000-of-00002"
    assert str(caught.value).startswith(
        f"{file}, record 9: expected a label of 0..9, found 10. Labels that count from "
        "1 need --label_offset=1."
    )
    split = classic(stored, tmp_path, labels, classes=10, label_offset=1)
    _, found = arrays(training(split, last=1, batch=20))
    np.testing.assert_array_equal(found.sum(axis=0), 2)


def test_labels_that_count_from_0_are_recognised(stored, tmp_path):
    with pytest.raises(
        ValueError, match="found 0. Labels that count from 0 need --lab"
    ):
        classic(stored, tmp_path, np.arange(20) % 10, classes=10, label_offset=1)


def test_a_label_that_the_sample_has_not_is_found_when_it_is_read(
    stored, tmp_path, monkeypatch
):
    labels = np.ones(40, int)
    labels[33] = 10
    monkeypatch.setattr(imagenet_data.imagenet_examples, "LABELS_LOOKED_AT", 3)
    split = classic(stored, tmp_path, labels, classes=10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="--label_offset=1"):
        arrays(training(split, last=2, batch=20, skip_corrupt=True))
    assert not split.skipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 25, "size": 2}, "Nearest valid values: 24 and 26"),
        ({"batch": 24, "size": 3, "accumulation": 5}, "3 ranks with 5 batches each"),
        ({"batch": 300, "size": 2}, "got 200 samples for a global_batch of 300"),
        ({"batch": 201, "size": 201}, "at least one sample for each of 201 ranks"),
        ({"batch": 0}, "global_batch"),
        ({"first": 5, "last": 5}, "Expected 0 <= first_step < last_step, got 5, 5"),
        ({"threads": 0}, "Expected at least 1 thread, got 0"),
        ({"accumulation": 0}, "accumulation of at least 1, got 0"),
        ({"rank": 2, "size": 2}, "Expected a rank of 0..1, got 2"),
    ],
)
def test_a_batch_that_cannot_be_dealt_is_refused(train, options, message):
    with pytest.raises(ValueError, match=message):
        training(train, **options)


def test_more_ranks_than_held_out_pictures_are_refused(held_out):
    with pytest.raises(ValueError, match="each of 51 ranks, got 50. Start at most 50"):
        validation(held_out, 0, 51)


def folder_with(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("data_format", "names", "options", "message"),
    [
        ("zip", (), {}, "Expected --data_format of tfds, tfrecord, folder, synthetic"),
        ("tfds", (), {}, "Expected imagenet2012/5.1.0/dataset_info.json in "),
        ("tfds", (), {"label_offset": 2}, "--label_offset of 0 or 1, got 2"),
        ("tfrecord", (), {}, "Expected files like train-00000-of-01024"),
        (
            "folder",
            (),
            {},
            "Expected the folder .*/train, with a folder for each .* does not exist",
        ),
        ("folder", ("train/a",), {}, "expected pictures .* in its 1 folders"),
        (
            "folder",
            ("train/a", "train/b"),
            {"classes": 1},
            "at most 1 folders, one for",
        ),
        ("folder", ("train/a",), {"label_offset": 1}, "no labels are read"),
        ("folder", ("train/a",), {"examples": 5}, "Expected no number of examples"),
        ("synthetic", (), {"examples": 5}, "Expected no --data_dir with"),
    ],
)
def test_data_that_are_not_there_are_said_to_be(
    tmp_path, data_format, names, options, message
):
    folder = folder_with(tmp_path, *names)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        imagenet_data.open_split(data_format, folder, "train", **options)


def test_classes_that_only_validation_has_are_refused(tmp_path):
    folder = folder_with(tmp_path, "train/a", "train/c", "val/a", "val/b")
    with pytest.raises(
        ValueError, match="expected only classes that are in .*train, f.* b"
    ):
        imagenet_data.open_split("folder", folder, "validation")


def test_a_class_that_validation_has_not_does_not_move_labels(tmp_path):
    folder = folder_with(tmp_path, "train/a", "train/b", "train/c", "val/a", "val/c")
    picture = tf.io.encode_jpeg(np.zeros([40, 40, 3], np.uint8)).numpy()
    for name in ("val/a/1.JPEG", "val/c/2.JPEG"):
        (folder / name).write_bytes(picture)
    split = imagenet_data.open_split("folder", folder, "validation", classes=3)
    assert arrays(validation(split))[1].argmax(axis=1).tolist() == [0, 2]


def test_only_files_that_are_not_hidden_are_pictures(tmp_path):
    folder = folder_with(tmp_path, "train/a/folder.jpg", "train/b")
    for name in ("a/._1.jpg", "a/1.jpg", "b/2.PNG", "b/.3.png"):
        (folder / "train" / name).write_bytes(b"a picture")
    split = imagenet_data.open_split("folder", folder, "train", classes=2)
    found = [Path(split.locate(position)).name for position in range(len(split))]
    assert found == ["1.jpg", "2.PNG"]


def test_a_missing_shard_is_named(stored, tmp_path):
    shutil.copytree(stored["tfrecord"][0], tmp_path / "copy")
    (tmp_path / "copy" / "train-00002-of-00004").unlink()
    with pytest.raises(ValueError, match="Missing: .*train-00002-of-00004"):
        imagenet_data.open_split("tfrecord", tmp_path / "copy", "train", label_offset=1)


def test_two_sets_of_files_are_refused(stored, tmp_path):
    shutil.copytree(stored["tfrecord"][0], tmp_path / "copy")
    (tmp_path / "copy" / "train-00000-of-00001").touch()
    with pytest.raises(ValueError, match="-of-00001 and -of-00004"):
        imagenet_data.open_split("tfrecord", tmp_path / "copy", "train")


def test_a_cut_off_shard_is_named(tiny_imagenet, tmp_path):
    shutil.copytree(tiny_imagenet, tmp_path / "copy")
    file = pictures.record_files(tmp_path / "copy", "train")[1]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=file.name):
        imagenet_data.open_split("tfds", tmp_path / "copy", "train")


def test_another_file_format_of_tfds_is_refused(tiny_imagenet, tmp_path):
    shutil.copytree(tiny_imagenet, tmp_path / "copy")
    info = tmp_path / "copy" / pictures.VERSION / "dataset_info.json"
    text = info.read_text().replace('"tfrecord"', '"array_record"')
    info.write_text(text)
    with pytest.raises(ValueError, match="file format tfrecord, found array_record"):
        imagenet_data.open_split("tfds", tmp_path / "copy", "train")


def test_a_builder_is_opened_by_its_own_folder_too(tiny_imagenet):
    own = tiny_imagenet / pictures.VERSION
    split = imagenet_data.open_split("tfds", own, "train")
    assert len(split) == EXAMPLES and str(own) in split.locate(0)
