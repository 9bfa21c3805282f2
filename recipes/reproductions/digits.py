"""Real digits of 8 x 8 pixels, which the package scikit-learn contains."""

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

    Images are float32 of shape [n, 64] in 0..1; labels are int32 of shape [n].
    """

    train: Arrays
    test: Arrays


def load() -> Digits:
    """Loads 1,408 training digits and 389 test digits, the same in every process.

    Only the file is read: importing the package would import SciPy.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "Expected the package scikit-learn, which contains the digits, but found "
            "none. Run: pip install --no-deps scikit-learn"
        )
    folder = Path(spec.submodule_search_locations[0])
    with gzip.open(folder / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(0).permutation(rows)
    images, labels = rows[:, :PIXELS] / 16, rows[:, PIXELS].astype(np.int32)
    return Digits(
        train=(images[:TRAIN], labels[:TRAIN]), test=(images[TRAIN:], labels[TRAIN:])
    )
