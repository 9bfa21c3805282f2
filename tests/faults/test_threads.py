"""Two models that are trained in two threads: refused, and no rank ends with code 0."""

import re

import pytest
from helpers.deadline import deadline
from helpers.launcher import python, run

TWO_MODELS = """
import sys, threading
import keras, numpy as np, tfdist

tfdist.init()
rank, is_named = tfdist.rank(), "named" in sys.argv
x = np.random.RandomState(rank).randn(16, 8).astype("float32")


def make(k):
    keras.utils.set_random_seed(k)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="d")])
    name = f"model {k}" if is_named else None
    own = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01), name=name)
    model.compile(own, "mse")
    return model


def train(k):
    for _ in range(30):
        models[k].train_on_batch(x, (1 + 49 * k) * x[:, :1])


models = [make(0), make(1)]
order = (0, 1) if rank == 0 else (1, 0)
threads = [threading.Thread(target=train, args=[k]) for k in order]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("WEIGHTS", [model.get_weights()[0].tobytes().hex() for model in models])
"""


@pytest.mark.slow
@deadline(240)
@pytest.mark.parametrize("size", [2, 3])
def test_two_models_without_names_end_the_job(tmp_path, size):
    command = python(TWO_MODELS)
    result = run(tmp_path, "-np", str(size), *command, timeout_s=200.0)
    assert result.code == 1
    assert "both call 'list of gradients or variables'" in result.stderr


@pytest.mark.slow
@deadline(240)
@pytest.mark.parametrize("size", [2, 3])
def test_two_models_with_names_end_equal_on_all_ranks(tmp_path, size):
    command = [*python(TWO_MODELS), "named"]
    result = run(tmp_path, "-np", str(size), *command, timeout_s=200.0)
    assert result.code == 0, result.stderr
    weights = re.findall("WEIGHTS (.+)", result.stdout)
    assert len(weights) == size and len(set(weights)) == 1
