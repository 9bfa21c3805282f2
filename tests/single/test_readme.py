"""README.md: short, and its lines run."""

import keras
import numpy as np
from helpers.pages import blocks_of, run_page
from helpers.tree import ROOT

import tfdist

README = "../README.md"  # seen from docs/
WORDS = 900


def test_the_five_lines_train_a_model():
    keras.utils.set_random_seed(1)
    tfdist.init()
    images = np.random.default_rng(1).normal(size=(128, 4)).astype("float32")
    labels = (images.sum(axis=1) > 0).astype("int32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "softmax")])
    [block] = blocks_of(README)
    assert [block.count(f"# {n}\n") for n in range(1, 7)] == [1, 1, 1, 1, 1, 0]
    names = {"images": images, "labels": labels, "model": model}
    run_page(README, names)
    assert int(model.optimizer.iterations) == 12 * 2
    losses = model.history.history["loss"]
    assert losses[-1] < losses[0]


def test_it_stays_short():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= WORDS
