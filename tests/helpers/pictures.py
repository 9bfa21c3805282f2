"""The made pictures of `recipes/make_tiny_imagenet.py`, in each form that ImageNet has.

A test that needs them asks for the fixture `tiny_imagenet` of tests/conftest.py, which
is made once, and makes the other forms from it:

    def test_labels(tiny_imagenet, tmp_path):
        pictures.as_folders(tiny_imagenet, tmp_path)

All forms hold the same bytes under the same labels, in the same order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
import make_tiny_imagenet  # noqa: E402
import prepare_imagenet  # noqa: E402

SPLITS = ("train", "validation")
VERSION = "imagenet2012/5.1.0"


class Example(NamedTuple):
    """One picture of the prepared data."""

    name: str
    jpeg: bytes
    label: int

    @property
    def digit(self) -> int:
        """What is drawn, as the comment in the JPEG file says."""
        start = self.jpeg.index(b"digit ") + len(b"digit ")
        return int(self.jpeg[start : start + 1])


def tars(folder: Path, **asked: Any) -> Path:
    """Writes both tars; `asked` are attributes of `make_tiny_imagenet.Pictures`."""
    make_tiny_imagenet.make(folder, make_tiny_imagenet.Pictures(**asked))
    return folder


def prepared(folder: Path, *, files: int | None = None, **asked: Any) -> Path:
    """What the real builder makes of the tars, in `files` files a split.

    Returns:
        The data_dir, with imagenet2012/5.1.0 in it.
    """
    data_dir = folder / "data"
    prepare_imagenet.prepare(tars(folder / "tars", **asked), data_dir, files)
    return data_dir


def synsets() -> list[str]:
    """The name of each of the 1,000 labels; they are sorted."""
    path = "datasets/imagenet2012/labels.txt"
    return make_tiny_imagenet.file_of("tensorflow_datasets", path).read_text().split()


def record_files(data_dir: Path, split: str) -> list[Path]:
    """The files of a split, in order."""
    return sorted((data_dir / VERSION).glob(f"imagenet2012-{split}.tfrecord-*"))


def examples(data_dir: Path, split: str) -> list[Example]:
    """All pictures of a split, in the order of the files."""
    import tensorflow as tf

    files = [str(path) for path in record_files(data_dir, split)]
    found = []
    for record in tf.data.TFRecordDataset(files).as_numpy_iterator():
        feature = tf.train.Example.FromString(record).features.feature
        name = feature["file_name"].bytes_list.value[0].decode()
        jpeg = feature["image"].bytes_list.value[0]
        found.append(Example(name, jpeg, feature["label"].int64_list.value[0]))
    return found


def as_classic_tfrecords(
    data_dir: Path, folder: Path, *, shards: int = 4, label_offset: int = 1
) -> Path:
    """The record files from before tensorflow-datasets: train-00000-of-00004 and on.

    Returns:
        The folder, which is made.
    """
    import tensorflow as tf

    def text(value: bytes) -> tf.train.Feature:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    def number(value: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        found = examples(data_dir, split)
        bounds = [len(found) * shard // shards for shard in range(shards + 1)]
        for shard in range(shards):
            path = folder / f"{split}-{shard:05d}-of-{shards:05d}"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for one in found[bounds[shard] : bounds[shard + 1]]:
                    feature = {
                        "image/encoded": text(one.jpeg),
                        "image/class/label": number(one.label + label_offset),
                        "image/filename": text(one.name.encode()),
                    }
                    features = tf.train.Features(feature=feature)
                    example = tf.train.Example(features=features)
                    writer.write(example.SerializeToString())
    return folder


def as_folders(data_dir: Path, folder: Path) -> Path:
    """train and validation, each with a folder for each of the 1,000 classes.

    Most of them are empty. The files sort by their own names, whatever class they are
    in, into the order of the prepared data.

    Returns:
        The folder, which is made.
    """
    classes = synsets()
    for split in SPLITS:
        for name in classes:
            (folder / split / name).mkdir(parents=True)
        for place, one in enumerate(examples(data_dir, split)):
            path = folder / split / classes[one.label] / f"{place:06d}_{one.name}"
            path.write_bytes(one.jpeg)
    return folder
