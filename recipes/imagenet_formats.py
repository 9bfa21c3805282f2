"""Opens ImageNet in the formats that are common on disk, as records.

- "tfds": prepared by tensorflow-datasets, e.g. by the builder `imagenet2012`;
- "tfrecord": older TFRecord files, `train-00000-of-01024` and so on;
- "folder": a folder for each class, `train/n01440764/n01440764_10026.JPEG`.

A record is parsed into an encoded picture and a label, as stored in the files. The
module `imagenet_examples` checks the label and converts labels that count from 1.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

import tfdist

SPLITS = ("train", "validation")
FOLDERS = {"train": ("train",), "validation": ("validation", "val")}
PICTURES = (".jpeg", ".jpg", ".png")  # file extensions, in lower case


@dataclasses.dataclass(frozen=True)
class Source:
    """A split on disk.

    Attributes:
        records: the records, in the order of the split.
        parse: (serialized record, position) -> (encoded picture, label), all scalars;
            the types are (string, int64) -> (string, int64).
        labels_in_records: whether the labels are stored in the records, so that they
            can be out of range. False for labels from folders.
    """

    records: tfdist.data.Records
    parse: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    labels_in_records: bool = True


def open_tfds(data_dir: Path, split: str, classes: int) -> Source:
    """Opens a split that tensorflow-datasets has prepared.

    Args:
        data_dir: the `data_dir` of `tfds.builder("imagenet2012", data_dir=...)`; or the
            folder with the dataset_info.json of another data set that has the features
            `image` and `label`.
        split: "train" or "validation".
        classes: number of classes of the network.

    Raises:
        FileNotFoundError: no data are prepared in the folder, or a file is missing.
        ValueError: the data have a different format, or more than `classes` classes.
    """
    import tensorflow_datasets as tfds  # not needed for the other formats

    # Not tfds.builder(), which queries the network for missing data.
    builder = tfds.builder_from_directory(_prepared(data_dir))
    info = builder.info
    if split not in info.splits:
        raise FileNotFoundError(
            f"{builder.data_dir}: expected the split {split}, found "
            f"{', '.join(info.splits) or 'none'}. {_PREPARE}"
        )
    if info.file_format.value != "tfrecord":
        raise ValueError(
            f"{builder.data_dir}: expected records in the file format tfrecord, found "
            f"{info.file_format.value}. Prepare the data set as tfrecord."
        )
    _check_features(info, classes)
    files = info.splits[split]
    records = tfdist.data.Records.from_tfrecords(files.filepaths, files.shard_lengths)
    return Source(records, _parser("image", "label"))


_PREPARE = "Prepare ImageNet with recipes/prepare_imagenet.py."


def _prepared(data_dir: Path) -> Path:
    """Returns the folder of the newest version."""
    if (data_dir / "dataset_info.json").exists():
        return data_dir
    found = list(data_dir.glob("imagenet2012/*/dataset_info.json"))
    if not found:
        raise FileNotFoundError(
            f"Expected imagenet2012/5.1.0/dataset_info.json in {data_dir}, found none. "
            f"{_PREPARE} If it is prepared, set --data_dir to the folder above "
            "imagenet2012/."
        )
    return max(
        (path.parent for path in found),
        key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)],
    )


def _check_features(info, classes: int) -> None:
    import tensorflow_datasets as tfds

    expected = {"image": tfds.features.Image, "label": tfds.features.ClassLabel}
    found = dict(info.features.items())
    for name, kind in expected.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(
                f"Expected {info.full_name} to have the features image and label, an "
                f"Image and a ClassLabel; found {name}: {found.get(name)}."
            )
    if info.features["label"].num_classes > classes:
        raise ValueError(
            f"Expected at most {classes} classes, but {info.full_name} has "
            f"{info.features['label'].num_classes}. Set --classes."
        )


def open_tfrecord(data_dir: Path, split: str) -> Source:
    """Opens TFRecord files `SPLIT-00000-of-01024`.

    They have the features `image/encoded` and `image/class/label`.

    Args:
        data_dir: folder of the files, or the folder with `train/` and `validation/`.
        split: "train" or "validation".

    Raises:
        FileNotFoundError: there are no such files, or one of them is missing.
        ValueError: a file is truncated, or there are two sets of files.
    """
    digits = "[0-9]" * 5
    pattern = f"{split}-{digits}-of-{digits}"
    files = sorted(data_dir.glob(pattern)) or sorted((data_dir / split).glob(pattern))
    if not files:
        raise FileNotFoundError(
            f"Expected files like {split}-00000-of-01024 in {data_dir}, found none. "
            "Set --data_dir to their folder."
        )
    records = tfdist.data.Records.from_tfrecords(files)
    return Source(records, _parser("image/encoded", "image/class/label"))


def _parser(image: str, label: str):
    """Returns a function that reads two features of a serialized `tf.train.Example`."""
    features = {
        image: tf.io.FixedLenFeature([], tf.string),
        label: tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(serialized: tf.Tensor, position: tf.Tensor):
        del position
        example = tf.io.parse_single_example(serialized, features)
        return example[image], example[label]

    return parse


def open_folder(data_dir: Path, split: str, classes: int) -> Source:
    """Opens a split that has a folder of pictures for each class.

    A label is the index of the class in the sorted list of class folders.

    The examples are ordered by file name, then by path. A class may be empty. The
    classes are the folders of `train/`, also for validation. Otherwise, a class that is
    missing in `validation/` would change the labels of other classes.

    Args:
        data_dir: folder with `train/`, and `validation/` or `val/`.
        split: "train" or "validation".
        classes: number of classes of the network; there may be fewer folders.

    Raises:
        FileNotFoundError: the folder does not exist, or contains no picture.
        ValueError: there are more folders than classes, or folders that are not in
            `train/`.
    """
    folders = {name: _split_folder(data_dir, name) for name in SPLITS}
    folder = folders[split]
    if folder is None:
        expected = " or ".join(f"{data_dir / name}" for name in FOLDERS[split])
        raise FileNotFoundError(
            f"Expected the folder {expected}, with a folder for each class in it, but "
            "it does not exist."
        )
    reference = folders["train"] or folder
    names = _class_folders(reference)
    unknown = sorted(set(_class_folders(folder)) - set(names))
    if unknown:
        raise ValueError(
            f"{folder}: expected only classes that are in {reference}, found "
            f"{unknown[0]} ({len(unknown)} unknown in all). Labels are indices of "
            f"the sorted classes of {reference}."
        )
    if len(names) > classes:
        raise ValueError(
            f"{reference}: expected at most {classes} folders, one for each class, "
            f"found {len(names)}. Set --classes={len(names)}, or remove folders that "
            "are not classes."
        )
    label_of = {name: label for label, name in enumerate(names)}
    found = sorted(
        (entry.name, entry.path, label_of[name])
        for name in _class_folders(folder)
        for entry in os.scandir(folder / name)
        if _is_picture(entry)
    )
    if not found:
        raise FileNotFoundError(
            f"{folder}: expected pictures ({', '.join(PICTURES)}) in its {len(names)} "
            "folders, found none."
        )
    records = tfdist.data.Records.from_files([path for _, path, _ in found])
    with tf.device("/CPU:0"):
        labels = tf.constant([label for _, _, label in found], tf.int64)

    def parse(serialized: tf.Tensor, position: tf.Tensor):
        return serialized, tf.gather(labels, position)

    return Source(records, parse, labels_in_records=False)


def _is_picture(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a picture; `._x.jpg` is macOS metadata of `x.jpg`."""
    name = entry.name.lower()
    return name.endswith(PICTURES) and not name.startswith(".") and entry.is_file()


def _split_folder(data_dir: Path, split: str) -> Path | None:
    for name in FOLDERS[split]:
        if (data_dir / name).is_dir():
            return data_dir / name
    return None


def _class_folders(folder: Path) -> list[str]:
    """Returns the sorted folder names; names that begin with a dot are ignored."""
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir() and not entry.name.startswith(".")
    )
