"""The lines of docs/gradients.md and docs/batch-normalization.md run, on one rank."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pages import blocks_of, run_page

import tfdist


def started() -> dict[str, Any]:
    """What the pages take for granted."""
    keras.utils.set_random_seed(1)
    tfdist.init()
    x = np.random.rand(8, 3).astype("float32")
    y = np.random.randint(2, size=(8, 1))
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    return {"keras": keras, "tf": tf, "tfdist": tfdist, "model": model, "x": x, "y": y}


@pytest.mark.parametrize("number", range(4))
def test_the_lines_about_gradients_run(number):
    names = started()
    variables = names["model"].trainable_variables
    names["loss_fn"] = keras.losses.SparseCategoricalCrossentropy()
    names["grads"] = [tf.ones(v.shape) for v in variables]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16" if number == 3 else before)
    names["optimizer"] = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    keras.config.set_dtype_policy(before)
    assert len(blocks_of("gradients.md")) == 4
    run_page("gradients.md", names, only=number)
    updates = int(names["optimizer"].iterations)  # the first of four batches makes none
    assert updates == [0, 1, 0, 1][number]


def test_the_lines_about_batch_normalisation_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = started()
    small = names["model"]
    monkeypatch.setattr(keras.applications, "ResNet50", lambda weights: small)
    alone = tfdist.add_process_set([0])  # the page has eight ranks
    monkeypatch.setattr(tfdist, "add_process_set", lambda ranks: alone)
    data = tfdist.data.shard((names["x"], names["y"]), batch_size=4)
    names["train"] = names["share"] = data
    assert len(blocks_of("batch-normalization.md")) == 3
    run_page("batch-normalization.md", names)
    assert tfdist.layers.is_synchronized(small.layers[0])
    assert (tmp_path / "best.keras").is_file()
