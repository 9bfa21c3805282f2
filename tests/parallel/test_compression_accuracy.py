"""Digits are learned as well with gradients sent in half types (`make test-slow`)."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SEEDS = 5


def accuracy(compression, seed):
    """Of the model and schedule of recipes/mnist_fit.py, after all of its epochs."""
    sys.path.insert(0, str(RECIPES))
    try:
        import mnist_data
        import mnist_fit
    finally:
        sys.path.remove(str(RECIPES))
    keras.utils.set_random_seed(seed)
    digits = mnist_data.load()
    batch = mnist_fit.GLOBAL_BATCH // tfdist.size()
    data = tfdist.data.shard(digits.train, batch_size=batch, shuffle=True, seed=seed)
    model = mnist_fit.build_model()
    rate = keras.optimizers.schedules.CosineDecay(3e-3, mnist_fit.EPOCHS * len(data))
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.Adam(rate), compression=compression
    )
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    model.fit(data, epochs=mnist_fit.EPOCHS, verbose=0, shuffle=False)
    _, found = model.evaluate(*digits.test, batch_size=250, verbose=0)
    return float(found)


@pytest.mark.slow
def test_the_accuracy_over_five_seeds_is_that_of_exact_gradients():
    means = {}
    for compression in (None, "fp16", "bf16"):
        found = [
            run_ranks(accuracy, 2, compression, seed, timeout_s=300)[0]
            for seed in range(SEEDS)
        ]
        means[compression] = float(np.mean(found))
        print(compression, f"{means[compression]:.4f}", found)
    for compression in ("fp16", "bf16"):
        assert abs(means[compression] - means[None]) <= 0.007, means
    assert means[None] >= 0.965
