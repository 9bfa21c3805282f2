"""What tests of the spellings of Keras 2 share: the mode, a model, what was told."""

import warnings

import keras
import numpy as np
import pytest

import tfdist
from tfdist.horovod import keras2

X = np.ones((4, 2), "float32")
Y = np.zeros((4, 1), "float32")


@pytest.fixture(autouse=True)
def mode():
    """Every test of a module that imports it runs in the mode."""
    keras.utils.clear_session()
    keras2.activate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras2.Keras2SpellingWarning)
        yield
    keras2.deactivate()
    tfdist.shutdown()


def told(act):
    """What `act` returns, and the spellings that it was warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    kind = keras2.Keras2SpellingWarning
    return result, [str(w.message) for w in caught if w.category is kind]


def linear_model(optimizer, **options):
    """Two inputs, whose weights begin at 1."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[-1].kernel.assign([[1.0], [1.0]])
    model.compile(optimizer, "mean_squared_error", **options)
    return model


def step_of(model):
    """How far one step has moved the first weight: the rate times 8 * w."""
    kernel = model.layers[-1].kernel
    before = kernel.numpy()
    model.fit(X, Y, batch_size=4, verbose=0)
    return float((before - kernel.numpy())[0, 0]) / float(before.sum() * 2)
