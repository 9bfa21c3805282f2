"""RMSpropWarmup against NumPy in float64, and what it takes and refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from single.test_optimizers import (
    START,
    STEPS,
    WARMUP,
    assert_goes_on,
    run,
    slopes,
    variables,
)

from tfdist.optimizers import MomentumSGD, RMSpropWarmup, Warmup, sgd_share
from tfdist.optimizers import warmup_factor as factor

TRANSITION = {"center_steps": 20, "period_steps": 12.5}


def reference(rate_at, decay=0.0, nesterov=False, correction=True, rmsprop_rate=0.01):
    """The equations of section 3 of the paper; the velocity has their sign."""
    ws = [value.copy() for value in START.values()]
    vs, ms = ([np.zeros_like(w) for w in ws] for _ in range(2))
    for step in range(STEPS):
        rate, a = rate_at(step), sgd_share(step, 20, 12.5)
        for i, (name, g) in enumerate(zip(START, slopes(ws), strict=True)):
            g = g + (0.0 if name in ("bias", "gamma") else decay) * ws[i]
            ms[i] = 0.99 * ms[i] + 0.01 * g**2
            b = (1 - a) * rmsprop_rate / rate
            inside, outside = (1.0, rate) if correction else (rate, 1.0)
            inner = -inside * (a + b / (np.sqrt(ms[i]) + 1e-8)) * g
            vs[i] = 0.9 * vs[i] + inner
            ws[i] = ws[i] + outside * (0.9 * vs[i] + inner if nesterov else vs[i])
    return ws


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ({}, "float64"),
        ({"decay": 0.05}, "float64"),
        ({"nesterov": True, "rmsprop_rate": 0.03}, "float64"),
        ({"correction": False}, "float64"),
        ({"decay": 0.05}, "float32"),
    ],
)
def test_it_follows_the_equations_of_the_paper(case, dtype):
    names = {"decay": "weight_decay", "correction": "momentum_correction"}
    options = {"rmsprop_rate": 0.01, **{names.get(k, k): v for k, v in case.items()}}
    optimizer = RMSpropWarmup(Warmup(0.1, **WARMUP), **TRANSITION, **options)
    expected = reference(lambda t: 0.1 * factor(t, 20, 0.1), **case)
    tolerance = 1e-6 if dtype == "float64" else 1e-5
    for a, b in zip(run(optimizer, variables(dtype)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert not np.allclose(expected[0], START["kernel"])


def test_the_share_of_sgd_rises_without_a_jump_to_one():
    found = [sgd_share(step / 100, 10, 5) for step in range(2000)]
    assert found[0] < 0.01 and found[1000] == 0.5
    assert all(0 <= b - a < 0.003 for a, b in zip(found, found[1:], strict=False))
    assert max(found) == found[1250] == 1.0


def test_after_the_transition_it_is_momentum_sgd():
    ends = []
    for optimizer in (
        RMSpropWarmup(0.1, center_steps=1, period_steps=2),
        MomentumSGD(0.1, momentum_correction=True),
    ):
        ws = variables()
        optimizer.build(ws)
        optimizer.iterations.assign(2)
        ends.append(run(optimizer, ws))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_first_step_has_the_size_of_rmsprops_whatever_the_gradient():
    for scale in (1e-4, 1.0, 1e4):
        w = keras.Variable(np.zeros(3), dtype="float64")
        optimizer = RMSpropWarmup(3.2, center_steps=100, period_steps=5)
        optimizer.apply([tf.constant(scale * np.array([1.0, -2.0, 3.0]))], [w])
        # The mean of the squares is (1 - rho) g^2.
        expected = 3e-4 / np.sqrt(0.01) * np.array([-1, 1, -1])
        np.testing.assert_allclose(w.numpy(), expected, rtol=0.02)


def test_a_rate_of_zero_moves_nothing():
    w = keras.Variable(np.ones(3), dtype="float32")
    for correction in (True, False):
        RMSpropWarmup(0.0, **TRANSITION, momentum_correction=correction).apply(
            [tf.ones(3)], [w]
        )
    np.testing.assert_array_equal(w.numpy(), np.ones(3))


def test_accumulated_batches_count_as_steps():
    accumulating = RMSpropWarmup(
        0.1, center_steps=8, period_steps=8, gradient_accumulation_steps=2
    )
    at_once = RMSpropWarmup(0.1, center_steps=4, period_steps=4)
    at_once.build(variables(names=["kernel"]))
    a, b = variables(names=["kernel"]), at_once._trainable_variables
    gradients = np.random.default_rng(2).normal(size=(3, 2, 6, 4))
    for number, (first, second) in enumerate(gradients):
        accumulating.apply([tf.constant(first)], a)
        accumulating.apply([tf.constant(second)], a)
        # The update is made with the second batch, which is step 1, 3, 5 of 8.
        at_once.center_steps = 4 - 0.5
        at_once.apply([tf.constant((first + second) / 2)], b)
        assert int(at_once.iterations) == number + 1
    np.testing.assert_allclose(a[0].numpy(), b[0].numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("center_steps", 0),
        ("period_steps", -1.0),
        ("rmsprop_rate", 0.0),
        ("rho", 1.0),
        ("epsilon", "1e-8"),
    ],
)
def test_wrong_options_are_refused(option, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{option}: "):
        RMSpropWarmup(0.1, **{**TRANSITION, option: value})


def test_a_loaded_one_goes_on_where_it_was(tmp_path):
    optimizer = RMSpropWarmup(0.1, center_steps=3, period_steps=6, exclude="bias")
    assert_goes_on(optimizer, tmp_path / "model.keras")
