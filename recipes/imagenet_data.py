"""Batches of ImageNet for data-parallel training, the same for any number of ranks.

    split = open_split("tfds", "~/tensorflow_datasets", "train")
    batches = split.training_batches(
        first_step=0, last_step=90 * (len(split) // 256), global_batch=256, seed=1
    )
    model.fit(batches.map(...), steps_per_epoch=len(split) // 256, epochs=90)

The seed and the step number alone determine which samples a step uses, and how each
sample is cropped (`tfdist.data.positions`). So an interrupted run continues exactly
where it stopped, with any number of ranks. One dataset covers all epochs, without a
pause between them.

A single parallel `map` reads a record, decodes and crops it in one operation, then
scales and mirrors it (`imagenet_pictures`). The order is always the same.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import imagenet_examples
import imagenet_formats
import imagenet_pictures
import numpy as np
import tensorflow as tf

import tfdist

FORMATS = ("tfds", "tfrecord", "folder", "synthetic")
IMAGENET = {"train": 1_281_167, "validation": 50_000}  # number of pictures


def open_split(
    data_format: str,
    data_dir: str | os.PathLike[str] | None,
    split: str,
    *,
    classes: int = 1000,
    label_offset: int = 0,
    examples: int | None = None,
    seed: int = 0,
) -> Split:
    """Opens a split, and checks its labels.

    The labels of up to 1,000 records, spread evenly over the files, are checked
    immediately, and every other label when its record is read. Labels that count from 1
    are detected when a label of the last class is read. The sample contains one if
    there are few classes, and in two of three cases if there are 1,000 classes.
    Otherwise, such labels are detected within the first steps.

    Args:
        data_format: "tfds", "tfrecord" or "folder" (`imagenet_formats`), or
            "synthetic": random pictures, to measure speed without data.
        data_dir: folder of the data; None for "synthetic".
        split: "train" or "validation".
        classes: number of classes of the network. Default 1000.
        label_offset: the label of the first class in the files, 0 or 1. Default 0;
            labels in the older TFRecord files ("tfrecord") count from 1.
        examples: number of "synthetic" pictures; not allowed for other formats.
            Default: the number in ImageNet.
        seed: seed of the "synthetic" pictures. Default 0.

    Returns:
        The split.

    Raises:
        FileNotFoundError: the data, or some of the files, are missing.
        ValueError: an argument is out of range, a file is damaged, or a label is not
            in `label_offset..label_offset + classes - 1`; the message names the file.

    Example:
        >>> import imagenet_data
        >>> split = imagenet_data.open_split("synthetic", None, "train", examples=64)
        >>> batches = split.training_batches(
        ...     first_step=0, last_step=2, global_batch=32, seed=1, rank=0, size=2,
        ...     image_size=64)
        >>> [tuple(images.shape) for images, labels in batches]
        [(16, 64, 64, 3), (16, 64, 64, 3)]
    """
    if data_format not in FORMATS:
        raise ValueError(
            f"Expected --data_format of {', '.join(FORMATS)}, got {data_format!r}."
        )
    if split not in imagenet_formats.SPLITS:
        raise ValueError(f"Expected the split train or validation, got {split!r}.")
    if label_offset not in (0, 1):
        raise ValueError(f"Expected --label_offset of 0 or 1, got {label_offset}.")
    if label_offset and data_format in ("folder", "synthetic"):
        raise ValueError(
            f"Expected --label_offset=0, got {label_offset}: with "
            f"--data_format={data_format} no labels are read."
        )
    if data_format == "synthetic":
        if data_dir:
            raise ValueError(
                f"Expected no --data_dir with --data_format=synthetic, got {data_dir}."
            )
        if examples is None:
            examples = IMAGENET[split]
        if examples < 1:
            raise ValueError(f"Expected at least 1 synthetic example, got {examples}.")
        return Split(imagenet_examples.Synthetic(examples, classes, seed))
    if examples is not None:
        raise ValueError(
            f"Expected no number of examples with --data_format={data_format}, got "
            f"{examples}: the files determine the number."
        )
    if not data_dir:
        raise ValueError(
            f"Expected --data_dir with --data_format={data_format}, got none."
        )
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"Expected the folder {folder} with data, found none.")
    if data_format == "tfds":
        source = imagenet_formats.open_tfds(folder, split, classes)
    elif data_format == "tfrecord":
        source = imagenet_formats.open_tfrecord(folder, split)
    else:
        source = imagenet_formats.open_folder(folder, split, classes)
    return Split(imagenet_examples.Stored(source, classes, label_offset))


class Split:
    """The examples of a split, and batches of them. Created by `open_split`."""

    def __init__(self, examples: imagenet_examples.Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._examples)

    @property
    def skipped(self) -> collections.Counter[int]:
        """Number of times each example, by position, was skipped on this rank.

        Examples are skipped if they are damaged and `skip_corrupt` is set. Examples
        that were read ahead are included.
        """
        return self._examples.skipped

    @property
    def failure(self) -> str | None:
        """Description of the data error that an iterator raised, with the file's name.

        None if no error has been raised.
        """
        return self._examples.failure

    def locate(self, position: int) -> str:
        """Returns the location of an example, for messages."""
        return self._examples.locate(position)

    def training_batches(
        self,
        *,
        first_step: int,
        last_step: int,
        global_batch: int,
        seed: int,
        accumulation: int = 1,
        rank: int | None = None,
        size: int | None = None,
        image_size: int = 224,
        threads: int | None = None,
        skip_corrupt: bool = False,
        readers: int | None = None,
    ) -> tf.data.Dataset:
        """Returns this rank's batches of the steps `first_step..last_step - 1`.

        Steps are counted over all epochs, from 0; an epoch has `len(self) //
        global_batch` steps. The dataset ends after the last step, without a pause
        between epochs.

        Args:
            first_step: first step: 0, or the number of steps done before.
            last_step: the first step that is not included.
            global_batch: samples of all ranks in one step, a multiple of
                `size * accumulation`.
            seed: seed for the order and the crops.
            accumulation: number of batches of this rank in a step, each with
                `global_batch / size / accumulation` samples. Default 1.
            rank: default `tfdist.rank()`.
            size: default `tfdist.size()`.
            image_size: height and width in pixels. Default 224.
            threads: threads that decode pictures. Default: the number of CPUs that this
                process may use; if ranks share CPUs, use
                `imagenet_examples.own_threads()`.
            skip_corrupt: if True, a damaged record or picture becomes a black picture
                with label and weight 0, and is counted in `skipped`; all other samples
                stay in place. Default False: it raises an error.
            readers: number of ranks that read the files and send records to the other
                ranks (`tfdist.data.scatter`). All ranks must then call this function
                with their own rank and size, and read the datasets at the same time.
                Default: each rank reads its own records.

        Returns:
            A dataset of `(last_step - first_step) * accumulation` batches: images uint8
            `[b, image_size, image_size, 3]`, labels float32 `[b, classes]`, one-hot;
            with `skip_corrupt` also weights float32 `[b]`. If an example is damaged, or
            its label out of range, the iterator raises
            `tensorflow.errors.InvalidArgumentError`, which names the file and record.

        Raises:
            ValueError: an argument is out of range, the global batch cannot be divided,
                or there are fewer examples than ranks or than a global batch.
        """
        rank, size = _place(rank, size, readers)
        _check_division(global_batch, size, accumulation)
        tfdist.data.positions(  # raises errors that would otherwise come later
            len(self),
            global_batch=global_batch,
            seed=seed,
            epoch=0,
            rank=rank,
            size=size,
        )
        steps = len(self) // global_batch
        batch = global_batch // size // accumulation
        if not 0 <= first_step < last_step:
            raise ValueError(
                f"Expected 0 <= first_step < last_step, got {first_step}, {last_step}."
            )

        def of_epoch(rank: int, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            read = tfdist.data.positions(
                len(self),
                global_batch=global_batch,
                seed=seed,
                epoch=int(epoch),
                rank=rank,
                size=size,
                first_step=max(0, first_step - int(epoch) * steps),
            )
            rows = read[: last_step - max(first_step, epoch * steps)].reshape(-1, batch)
            return rows, np.full(len(rows), _key(seed, int(epoch)))

        def rows(rank: int) -> tf.data.Dataset:
            def in_graph(epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                rows, keys = tf.numpy_function(
                    functools.partial(of_epoch, rank),
                    [epoch],
                    [tf.int64, tf.int64],
                    stateful=False,
                )
                rows = tf.ensure_shape(rows, [None, batch])
                return rows, tf.ensure_shape(keys, [None])

            last_epoch = (last_step - 1) // steps
            epochs = tf.data.Dataset.range(first_step // steps, last_epoch + 1)
            # The order of the next epoch is computed before the current epoch ends.
            return (
                epochs.map(in_graph)
                .prefetch(1)
                .flat_map(lambda *rows: tf.data.Dataset.from_tensor_slices(rows))
            )

        def picture(encoded: tf.Tensor, position: tf.Tensor, key: tf.Tensor):
            seeds = tf.stack([key, position])
            return imagenet_pictures.training_picture(encoded, seeds, image_size)

        return imagenet_examples.batches(
            self._examples,
            self._read(rows, rank, readers),
            picture,
            image_size=image_size,
            count=(last_step - first_step) * accumulation,
            threads=_threads(threads),
            skip_corrupt=skip_corrupt,
        )

    def validation_batches(
        self,
        *,
        batch: int,
        rank: int | None = None,
        size: int | None = None,
        image_size: int = 224,
        threads: int | None = None,
        skip_corrupt: bool = False,
        readers: int | None = None,
    ) -> tf.data.Dataset:
        """Returns this rank's part of all examples, in order; the parts do not overlap.

        Rank r has the examples `n * r // size` to `n * (r + 1) // size - 1` of n.

        Args:
            batch: samples of this rank in a batch; the last batch may be smaller.
            rank: default `tfdist.rank()`.
            size: default `tfdist.size()`.
            image_size: height and width in pixels. Default 224.
            threads: as in `training_batches`.
            skip_corrupt: as in `training_batches`.
            readers: as in `training_batches`.

        Returns:
            A dataset as in `training_batches`; the static batch size b is unknown.

        Raises:
            ValueError: there are fewer examples than ranks.
        """
        rank, size = _place(rank, size, readers)
        if len(self) < size:
            raise ValueError(
                f"Expected at least one example for each of {size} ranks, got "
                f"{len(self)}. Start at most {len(self)} ranks."
            )
        if batch < 1:
            raise ValueError(f"Expected a batch of at least 1 sample, got {batch}.")

        def share(rank: int) -> tuple[int, int]:
            return len(self) * rank // size, len(self) * (rank + 1) // size

        def rows(rank: int) -> tf.data.Dataset:
            rows = tf.data.Dataset.range(*share(rank)).batch(batch)
            return rows.map(lambda row: (row, tf.constant(0, tf.int64)))

        def picture(encoded: tf.Tensor, position: tf.Tensor, key: tf.Tensor):
            del position, key
            return imagenet_pictures.validation_picture(encoded, image_size)

        begin, end = share(rank)
        return imagenet_examples.batches(
            self._examples,
            self._read(rows, rank, readers),
            picture,
            image_size=image_size,
            count=math.ceil((end - begin) / batch),
            threads=_threads(threads),
            skip_corrupt=skip_corrupt,
        )

    def _read(
        self,
        rows: Callable[[int], tf.data.Dataset],
        rank: int,
        readers: int | None,
    ) -> tf.data.Dataset:
        """Returns this rank's rows; with `readers`, together with their records."""
        if readers is None:
            return rows(rank)
        if isinstance(self._examples, imagenet_examples.Synthetic):
            raise ValueError(
                "Expected no --readers with --data_format=synthetic, got "
                f"{readers}: there is nothing to read."
            )
        return tfdist.data.scatter(
            lambda rank: imagenet_examples.read_rows(self._examples, rows(rank)),
            readers=readers,
        )


def _place(rank: int | None, size: int | None, readers: int | None) -> tuple[int, int]:
    rank = tfdist.rank() if rank is None else rank
    size = tfdist.size() if size is None else size
    if readers is not None and (rank, size) != (tfdist.rank(), tfdist.size()):
        raise ValueError(
            f"Expected the rank and size of this process, {tfdist.rank()} and "
            f"{tfdist.size()}, with readers, got {rank} and {size}."
        )
    if not 0 <= rank < size:
        raise ValueError(f"Expected a rank of 0..{size - 1}, got {rank}.")
    return rank, size


def _check_division(global_batch: int, size: int, accumulation: int) -> None:
    parts = size * accumulation
    if accumulation < 1:
        raise ValueError(f"Expected an accumulation of at least 1, got {accumulation}.")
    if accumulation > 1 and global_batch % parts:
        below = global_batch // parts * parts
        nearest = [str(n) for n in (below, below + parts) if n]
        raise ValueError(
            "Expected a global_batch that can be divided equally among "
            f"{size} ranks with {accumulation} batches each, got {global_batch}. "
            "Nearest valid values: "
            f"{' and '.join(nearest)}."
        )


def _threads(threads: int | None) -> int:
    """Returns the number of this rank's decoding threads."""
    if threads is None:
        return len(os.sched_getaffinity(0))
    if threads < 1:
        raise ValueError(f"Expected at least 1 thread, got {threads}.")
    return threads


def _key(seed: int, epoch: int) -> np.int64:
    """Returns the number that determines the crops of an epoch, from the seed."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return words.view(np.int64)[0]
