"""With TFDIST_ATOMIC_STEPS=1, a failed step changes no variable of the survivors."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

STEPS = 4  # the last one fails on rank 1


def adamw(**options):
    """An optimizer whose weight decay and step count do not use the gradients."""
    return keras.optimizers.AdamW(0.1, weight_decay=0.1, **options)


def wrapped(optimizer):
    return tfdist.DistributedOptimizer(optimizer), tf.GradientTape


STYLES = {
    "optimizer": lambda: wrapped(adamw()),
    "accumulation": lambda: wrapped(adamw(gradient_accumulation_steps=2)),
    "tape": lambda: (adamw(), tfdist.DistributedGradientTape),
}


def failing_step(style, is_nested):
    """Names of the variables that a step changes in which rank 1 fails late."""
    optimizer, tape_class = STYLES[style]()
    weights = [keras.Variable(np.ones(4, "float32"), name=f"w{i}") for i in range(3)]
    optimizer.build(weights)
    called = []

    def fail_late(x):
        called.append(x)
        if tfdist.rank() == 1 and len(called) == STEPS:
            time.sleep(0.3)
            raise ValueError("the last step of rank 1")
        return x

    def gradients(x):
        with tape_class() as tape:
            loss = tf.add_n([tf.reduce_sum(w * x) for w in weights])
        return tape.gradient(loss, [w.value for w in weights])

    if is_nested:
        gradients = tf.function(gradients)

    @tf.function
    def step(x):
        x = tf.ensure_shape(tf.numpy_function(fail_late, [x], x.dtype), x.shape)
        optimizer.apply(gradients(x), weights)

    state = {v.path: v for v in [*weights, *optimizer.variables]}
    for number in range(STEPS):
        before = {path: v.numpy() for path, v in state.items()}
        try:
            step(tf.ones(4))
        except tf.errors.OpError:
            assert number == STEPS - 1
            return [p for p, v in state.items() if np.any(v.numpy() != before[p])]
    return ["no error"]


@pytest.mark.parametrize(
    ("style", "is_nested"), [*((style, False) for style in STYLES), ("tape", True)]
)
def test_a_failed_step_changes_no_variable(style, is_nested):
    env = {"TFDIST_ATOMIC_STEPS": "1", "TFDIST_TIMEOUT_S": "30"}
    assert run_ranks(failing_step, 2, style, is_nested, env=env) == [[], []]
