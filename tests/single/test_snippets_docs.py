"""The lines of the pages about gradients and batch normalization run, on one rank."""

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


def with_gradients(*, policy: str | None = None) -> dict[str, Any]:
    """Names that the pages about gradients assume to exist."""
    names = started()
    names["loss_fn"] = keras.losses.SparseCategoricalCrossentropy()
    names["grads"] = [tf.ones(v.shape) for v in names["model"].trainable_variables]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy or before)
    names["optimizer"] = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    keras.config.set_dtype_policy(before)
    return names


# The first of four batches makes no update.
@pytest.mark.parametrize("number, updates", [(0, 0), (1, 1), (2, 1), (3, 1)])
def test_the_lines_about_gradients_run(number, updates):
    names = with_gradients(policy="mixed_float16" if number == 3 else None)
    assert len(blocks_of("gradients.md")) == 4
    run_page("gradients.md", names, only=number)
    assert int(names["optimizer"].iterations) == updates


def test_clipping_by_hand_under_a_loss_scale_equals_the_optimizers_own():
    weights = []
    for by_hand in (True, False):
        names = with_gradients()
        # So large that the norm is above 1.
        names["loss_fn"] = lambda y, p: 50.0 * keras.ops.mean((p - y) ** 2)
        if by_hand:
            run_page("gradients.md", names, only=2)
        else:
            inner = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
            with tfdist.DistributedGradientTape() as tape:
                loss = names["loss_fn"](
                    names["y"], names["model"](names["x"], training=True)
                )
            variables = names["model"].trainable_variables
            inner.apply(tape.gradient(loss, variables), variables)
        weights.append([v.numpy() for v in names["model"].trainable_variables])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_the_lines_about_local_variables_run():
    names = with_gradients()
    assert len(blocks_of("gradients-advanced.md")) == 1
    run_page("gradients-advanced.md", names)


def test_the_lines_about_batch_normalisation_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = started()
    small = names["model"]
    monkeypatch.setattr(keras.applications, "ResNet50", lambda weights: small)
    alone = tfdist.add_process_set([0])  # the page has eight ranks
    monkeypatch.setattr(tfdist, "add_process_set", lambda ranks: alone)
    data = tfdist.data.shard((names["x"], names["y"]), batch_size=4)
    names["train"] = names["share"] = data
    assert len(blocks_of("batch-normalization.md")) == 4
    run_page("batch-normalization.md", names)
    assert tfdist.layers.is_synchronized(small.layers[0])
    assert (tmp_path / "best.keras").is_file()


def test_the_lines_about_elastic_training_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = started()
    names["x"] = np.random.rand(100, 3).astype("float32")
    names["y"] = np.random.randint(2, size=(100, 1))
    compiled = names["model"]
    names["loss_fn"] = keras.losses.SparseCategoricalCrossentropy()
    names["optimizer"] = keras.optimizers.SGD(0.1)
    names["batch_of"] = lambda batch, rank, size: (names["x"][:8], names["y"][:8])
    assert len(blocks_of("elastic.md")) == 4
    run_page("elastic.md", names)
    names["state"] = tfdist.elastic.State(compiled)  # of a job of its own
    run_page("preemption.md", names)
    run_page("elastic-horovod.md", names)
    # One step of 64 in each epoch, or three of 32 for the same samples.
    assert int(compiled.optimizer.iterations) == 10 + 3 * 10
    assert int(names["optimizer"].iterations) == 200 + 3 * 10 + 1000
    assert names["state"].batch == 1000
    saved = sorted(path.name for path in tmp_path.glob("*.keras"))
    assert saved == ["step-100.keras", "step-200.keras"]
    kept = sorted(path.name for path in tmp_path.glob("run/*.keras"))
    assert kept == ["0000034.keras", "0000037.keras", "0000040.keras"]
