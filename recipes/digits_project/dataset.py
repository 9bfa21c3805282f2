"""The data: 1,797 handwritten digits of 8x8 pixels, from scikit-learn.

To use your own data, replace `load`; the other files use nothing else.
"""

import gzip
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

CLASSES = 10


class Data(NamedTuple):
    """Each part is (inputs, labels): float32 [n, 8, 8, 1] in 0..1, and int32 [n]."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load(test_part: float, seed: int) -> Data:
    """Loads all data, the same on every rank; the caller distributes it to the ranks.

    Args:
        test_part: fraction of the data that is not used for training, 0..1.
        seed: seed for the random choice of these data.

    Raises:
        FileNotFoundError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")  # only its files are read, no import
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("no digits: pip install --no-deps scikit-learn")
    folder = Path(spec.submodule_search_locations[0])
    with gzip.open(folder / "datasets/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(seed).permutation(rows)
    inputs = rows[:, :-1].reshape(-1, 8, 8, 1) / 16
    labels = rows[:, -1].astype(np.int32)
    cut = max(1, round(test_part * len(rows)))
    return Data(train=(inputs[cut:], labels[cut:]), test=(inputs[:cut], labels[:cut]))
