"""The warm-up schedule, and the rate that grows with the batch."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.optimizers import Warmup, scaled_rate, warmup_factor


def test_a_warm_up_is_its_closed_form_over_any_schedule():
    cosine = keras.optimizers.schedules.CosineDecay(0.4, 10)
    together = Warmup(cosine, 5, start=0.25)
    after = Warmup(cosine, 5, delay=True)
    call = tf.function(lambda s: (together(s), after(s)), autograph=False)
    for step in range(20):
        a, b = call(tf.constant(step, tf.int64))
        assert a.dtype == b.dtype == tf.float32
        shape = [0.2 * (1 + np.cos(np.pi * min(s / 10, 1))) for s in (step, step - 5)]
        expected = shape[0] * warmup_factor(step, 5, 0.25)
        np.testing.assert_allclose(a, expected, rtol=1e-6, atol=1e-8)
        expected = shape[1] if step >= 5 else 0.4 * step / 5
        np.testing.assert_allclose(b, expected, rtol=1e-6, atol=1e-8)
    assert float(Warmup(0.3, 0)(0)) == float(np.float32(0.3))


def test_a_warm_up_is_rebuilt_from_its_configuration():
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.5])
    for schedule in (steps, 0.5):
        warmup = Warmup(schedule, 4, start=0.5, delay=True)
        again = keras.optimizers.schedules.deserialize(
            json.loads(json.dumps(keras.optimizers.schedules.serialize(warmup)))
        )
        assert type(again) is Warmup
        assert again.get_config() == warmup.get_config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "0.1"}, "schedule: expected a number of at least 0, got str"),
        (
            {"schedule": lambda step: 0.1},
            "schedule: expected a LearningRateSchedule or",
        ),
        ({"schedule": -0.1}, "schedule: expected a number of at least 0"),
        ({"warmup_steps": 2.5}, "warmup_steps: expected a whole number of at least 0"),
        ({"warmup_steps": -1}, "warmup_steps: expected a whole number of at least 0"),
        ({"start": 1.5}, "start: expected a number from 0 to 1"),
        ({"start": None}, "start: expected a number of at least 0"),
        ({"delay": 1}, "delay: expected True or False, got int 1"),
    ],
)
def test_wrong_warm_ups_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Warmup(**{"schedule": 0.1, "warmup_steps": 4, **arguments})


def test_the_rate_grows_with_the_batch():
    assert scaled_rate(0.1, global_batch=8192) == pytest.approx(3.2)
    assert scaled_rate(0.2, global_batch=96, base_batch=32) == pytest.approx(0.6)
    for wrong in ({"global_batch": 64.0}, {"global_batch": 0}, {"base_batch": None}):
        with pytest.raises(
            (TypeError, ValueError), match="a whole number of at least 1"
        ):
            scaled_rate(0.1, **{"global_batch": 64, **wrong})
