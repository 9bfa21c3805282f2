"""Images per second of the ImageNet recipe's input, and of a plain tfds pipeline.

    python benchmarks/input_pipeline.py [--rounds 7] [--images 1024] [--data FOLDER]

Crops of two photographs, about 500 x 375 pixels like most pictures of ImageNet, are
packed into tars like those of ImageNet, and the real `imagenet2012` builder prepares
them. Then three pipelines make batches in turn, in one process, on the same cores:

- plain: `tfds.load` and what its guides say: decode, shuffle, crop, scale, mirror,
  normalize, batch, prefetch, with AUTOTUNE;
- plain, uint8: the same, but normalization is left to the model, as in the recipe;
- recipe: `recipes/imagenet_data.py`.

First it is checked that an epoch of the recipe has the labels of the data. In a round
each pipeline starts anew, makes some batches that do not count, and is then measured;
the order changes with every round. Reported: medians, 10th and 90th percentile, CPU
time of an image (which other programs on the machine change less), the median of the
ratios within a round, and how much a copy of memory, the control, varied. The last rows
show how long a step that otherwise sleeps for 50 ms waits for data, beside the wait for
a batch that already exists.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402
from control import Copier  # noqa: E402
from PIL import Image  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import imagenet_data  # noqa: E402
import make_tiny_imagenet  # noqa: E402
import prepare_imagenet  # noqa: E402

SIZE, CLASSES = 224, 1000
PICTURES = 400
# The most frequent widths and heights in ImageNet.
SHAPES = ((500, 375), (500, 333), (375, 500), (500, 375), (400, 500), (500, 400))
QUALITY = 95
MEAN = tf.constant([0.485, 0.456, 0.406]) * 255
DEVIATION = tf.constant([0.229, 0.224, 0.225]) * 255


class Photographer:
    """Draws crops of scikit-learn's photographs, in the sizes of ImageNet."""

    def __init__(self) -> None:
        names = ("china.jpg", "flower.jpg")
        self._photographs = [
            Image.open(
                make_tiny_imagenet.file_of("sklearn", f"datasets/images/{name}")
            ).convert("RGB")
            for name in names
        ]
        self.bytes: list[int] = []

    def draw(self, digit: int, number: int, train: bool) -> bytes:
        """A picture; the signature is that of `make_tiny_imagenet.Artist`."""
        lots = np.random.default_rng([digit, number, train])
        width, height = SHAPES[number % len(SHAPES)]
        whole = self._photographs[lots.integers(2)]
        scale = min(whole.width / width, whole.height / height) * lots.uniform(0.7, 1)
        left = lots.uniform(0, whole.width - scale * width)
        top = lots.uniform(0, whole.height - scale * height)
        box = (left, top, left + scale * width, top + scale * height)
        picture = whole.resize((width, height), Image.Resampling.BICUBIC, box)
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=QUALITY)
        self.bytes.append(file.tell())
        return file.getvalue()


def make_data(folder: Path) -> None:
    """Writes the tars, and prepares them."""
    tars, artist = folder / "tars", Photographer()
    tars.mkdir(parents=True, exist_ok=True)
    path = make_tiny_imagenet.file_of("tensorflow_datasets", make_tiny_imagenet.LABELS)
    labels = path.read_text().split()
    classes = make_tiny_imagenet.choose_classes(labels)
    with (tars / make_tiny_imagenet.TRAIN_TAR).open("wb") as file:
        make_tiny_imagenet.write_train(file, artist, classes, PICTURES)
    with (tars / make_tiny_imagenet.VALIDATION_TAR).open("wb") as file:
        make_tiny_imagenet.write_validation(file, artist, labels, classes, 10)
    prepare_imagenet.prepare(tars, folder, 4)
    mean = statistics.mean(artist.bytes) / 1e3
    print(f"{PICTURES} pictures of {mean:.0f} kB on average, quality {QUALITY}")


def plain(folder: Path, batch: int, normalise: bool = True) -> tf.data.Dataset:
    """The pipeline of the tensorflow-datasets and Keras guides, for a single rank."""

    def augment(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.shape(image),
            tf.zeros([0, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        image = tf.image.resize(tf.slice(image, begin, size), (SIZE, SIZE))
        image = tf.image.random_flip_left_right(image)
        if normalise:
            image = (image - MEAN) / DEVIATION
        else:
            image = tf.cast(image + 0.5, tf.uint8)
        return tf.ensure_shape(image, [SIZE, SIZE, 3]), tf.one_hot(label, CLASSES)

    data = tfds.load(
        "imagenet2012",
        data_dir=str(folder),
        split=tfds.even_splits("train", 1)[0],
        shuffle_files=True,
        as_supervised=True,
    )
    return (
        data.repeat()
        .shuffle(PICTURES)
        .map(augment, tf.data.AUTOTUNE)
        .batch(batch, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def recipe(folder: Path, batch: int, last_step: int = 10**6) -> tf.data.Dataset:
    """The pipeline of `recipes/imagenet_data.py`, for a single rank."""
    split = imagenet_data.open_split("tfds", folder, "train")
    return split.training_batches(
        first_step=0, last_step=last_step, global_batch=batch, seed=1, rank=0, size=1
    )


def constant(folder: Path, batch: int) -> tf.data.Dataset:
    """Repeats an existing batch: the wait that remains is due to the machine."""
    del folder
    shape = (batch, SIZE, SIZE, 3)
    one = tf.zeros(shape, tf.uint8), tf.zeros((batch, CLASSES))
    return tf.data.Dataset.from_tensors(one).repeat()


def check(folder: Path) -> None:
    """Raises unless an epoch of the recipe has the labels of the data."""
    data = tfds.load("imagenet2012", data_dir=str(folder), split="train")
    expected = sorted(int(one["label"]) for one in data.as_numpy_iterator())
    batches = recipe(folder, PICTURES // 8, 8).as_numpy_iterator()
    found = sorted(int(one) for _, labels in batches for one in labels.argmax(axis=1))
    if found != expected:
        raise SystemExit("An epoch of the recipe has other labels than the data.")


def rate(dataset: tf.data.Dataset, images: int, batch: int) -> tuple[float, float]:
    """Images per second, and CPU milliseconds of an image, after a warm-up."""
    iterator = iter(dataset)
    for _ in range(max(8, images // batch // 2)):
        next(iterator)
    count = images // batch
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(iterator)
    end_s, end_cpu_s = time.perf_counter(), time.process_time()
    made = count * batch
    return made / (end_s - begin_s), (end_cpu_s - begin_cpu_s) / made * 1e3


def waits_ms(dataset: tf.data.Dataset, steps: int, step_ms: float) -> list[float]:
    """Waits of the steps for data, in ms, after a first one that fills the pipeline."""
    iterator: Iterator[Any] = iter(dataset)
    next(iterator)
    found = []
    for _ in range(steps):
        time.sleep(step_ms / 1e3)
        begin_s = time.perf_counter()
        next(iterator)
        found.append((time.perf_counter() - begin_s) * 1e3)
    return found


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return float(middle), float(low), float(high)


def compare(folder: Path, rounds: int, images: int, batch: int) -> None:
    """Measures the pipelines in turn, and prints."""
    ways: dict[str, Callable[[], tf.data.Dataset]] = {
        "plain": lambda: plain(folder, batch),
        "plain, uint8": lambda: plain(folder, batch, normalise=False),
        "recipe": lambda: recipe(folder, batch),
    }
    copier, control = Copier(), []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        control.append(copier.gib_s())
        names = list(ways)
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(rate(ways[name](), images, batch))
    print(f"{'':14}{'images/s':>10}{'p10 - p90':>14}{'CPU ms':>8}", end="")
    print(f"{'of plain':>10}{'p10 - p90':>14}{'by CPU':>8}")
    for name, values in found.items():
        speed, low, high = percentiles([one for one, _ in values])
        cpu = statistics.median(one for _, one in values)
        pairs = list(zip(values, found["plain"], strict=True))
        ratio, least, most = percentiles([one[0] / base[0] for one, base in pairs])
        by_cpu = statistics.median(base[1] / one[1] for one, base in pairs)
        print(f"{name:14}{speed:10.0f}{f'{low:.0f} - {high:.0f}':>14}", end="")
        print(f"{cpu:8.2f}{ratio:10.2f}{f'{least:.2f} - {most:.2f}':>14}{by_cpu:8.2f}")
    spread = max(control) / min(control) - 1
    print(
        f"{rounds} rounds of {images} images in batches of {batch}; control "
        f"{statistics.median(control):.1f} GiB/s, varied by {spread:.0%}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--images", type=int, default=1024, help="images a round")
    parser.add_argument("--batch", type=int, default=64, help="images of a batch")
    parser.add_argument("--step_batch", type=int, default=16, help="images of a step")
    parser.add_argument("--steps", type=int, default=200, help="steps of 50 ms")
    parser.add_argument("--data", type=Path, help="where to keep the prepared data")
    options = parser.parse_args()
    tfds.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        if not (folder / "imagenet2012").exists():
            make_data(folder)
        check(folder)
        cores = len(os.sched_getaffinity(0))
        load = os.getloadavg()[0]
        print(f"TensorFlow {tf.__version__}, {cores} cores, load {load:.1f} before")
        compare(folder, options.rounds, options.images, options.batch)
        print(f"wait of a step of 50 ms for {options.step_batch} images, ms:")
        ways = {"plain": plain, "recipe": recipe, "constant": constant}
        for name, way in ways.items():
            waits = waits_ms(way(folder, options.step_batch), options.steps, 50.0)
            middle, last = np.percentile(waits, [50, 99])
            print(f"{name:14}median {middle:.2f}, p99 {last:.2f}, max {max(waits):.2f}")


if __name__ == "__main__":
    main()
