"""The gradient noise scale: its formula, and what it says."""

import math

import keras
import numpy as np
import pytest

import tfdist
from tfdist.gradients.noise_scale import advice, noise_scale


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_variance_over_the_squared_mean(seed):
    rng = np.random.default_rng(seed)
    signal, noise = rng.uniform(0.1, 3), rng.uniform(1, 100)
    found = noise_scale(
        signal + noise / 16, signal + noise / 128, own_batch=16, batch=128
    )
    assert found == pytest.approx(noise / signal)


def test_it_is_never_negative_and_infinite_without_a_signal():
    assert noise_scale(1.0, 1.5, own_batch=1, batch=2) == 0
    assert noise_scale(2.0, 1.0, own_batch=1, batch=2) == math.inf


def test_one_rank_cannot_measure_it():
    with pytest.raises(ValueError, match="at least two ranks"):
        noise_scale(1.0, 1.0, own_batch=4, batch=4)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (
            1000,
            "about 11.0 times the minimum number of steps and 1.1 times the minimum "
            "number of samples"
            "; larger batches, up to about 1000, need fewer steps",
        ),
        (
            100,
            "2.0 times the minimum number of steps and 2.0 times the minimum number of "
            "samples; a g",
        ),
        (10, "a smaller batch needs fewer samples and hardly more steps"),
        (0, "inf times the minimum number of samples; a smaller batch"),
        (math.inf, "the gradients are mostly noise"),
    ],
)
def test_the_advice_depends_on_the_batch(scale, words):
    assert words in advice(scale, 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 0}, "global_batch of at least 1 sample, got 0"),
        ({"global_batch": 8, "verbose": 2}, "verbose=0 or 1, got 2"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        tfdist.callbacks.GradientNoiseScale(**options)


def test_one_rank_is_refused():
    tfdist.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks = [tfdist.callbacks.GradientNoiseScale(4)]
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=callbacks)
