"""Real handwritten digits: 1,797 of 8 x 8 pixels, from a file of scikit-learn."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np


def load(count=1024):
    """Images float32 [count, 8, 8, 1] in 0..1 and labels int64 [count].

    Only the file is read: the package itself would import SciPy.
    """
    spec = importlib.util.find_spec("sklearn")
    path = Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64, max_rows=count)
    images = rows[:, :-1].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return images, rows[:, -1]
