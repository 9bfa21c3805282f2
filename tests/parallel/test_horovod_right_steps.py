"""Scripts that are right and hard to tell from wrong ones, on two ranks and on three.

Beside test_horovod_unreduced.py. Each case is a training of a few steps; what it is
compared with is a wrong one that looks alike, where there is one.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.guarded import guarded
from helpers.ranks import run_ranks

import tfdist
import tfdist.horovod.tensorflow as hvd
import tfdist.horovod.tensorflow.keras as hvd_keras
from tfdist import _core

wrapped = hvd.DistributedGradientTape
TAKEN = "taken"
# Eagerly, or while a step is traced; and when a traced one runs.
REFUSED = ("RuntimeError", "FailedPreconditionError")
CASES, EXPECTED = {}, {}


def case(expected):
    def add(function):
        CASES[function.__name__] = function
        EXPECTED[function.__name__] = expected
        return function

    return add


def variable(*shape):
    return keras.Variable(np.ones(shape, "float32"))


def gradients(loss, variables, wrap=None, persistent=False):
    with tf.GradientTape(persistent=persistent) as tape:
        value = loss()
    return (wrap(tape) if wrap else tape).gradient(value, variables)


def product(*factors):
    return (1.0 + hvd.rank()) * sum(tf.reduce_sum(f * f) for f in factors)


def apply(optimizer, grads, variables):
    optimizer.apply_gradients(zip(grads, variables, strict=True))


def sgd():
    return keras.optimizers.SGD(0.01)


def scaled(grads):
    return [0.5 * g for g in grads]


def in_worlds(in_graph):
    """Trains in one world, and goes on in others with the same optimizer."""
    weight, optimizer = variable(40), sgd()

    def take(grads):
        apply(optimizer, grads, [weight])

    take = tf.function(take) if in_graph else take
    with guarded():
        for steps in (1, 2, 1):
            if not tfdist.is_initialized():
                hvd.init()
            for _ in range(steps):
                take(scaled(gradients(lambda: product(weight), [weight], wrapped)))
            hvd.shutdown()
        hvd.init()
        try:
            take(gradients(lambda: product(weight), [weight]))
        except (RuntimeError, tf.errors.FailedPreconditionError):
            return "refused"
    return "taken"


@pytest.mark.parametrize("in_graph", [False, True])
def test_what_was_counted_in_another_world_is_not_taken_for_a_step_of_this(in_graph):
    assert run_ranks(in_worlds, 2, in_graph) == ["refused", "refused"]


def fit_outside_of_a_set():
    pair = hvd.add_process_set([0, 2])
    scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0)
    optimizer = hvd_keras.DistributedOptimizer(scaled, process_set=pair)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with guarded():
        model.compile(optimizer, "mse")
        model.fit(np.ones((24, 4)), np.ones((24, 2)), batch_size=8, verbose=0)
    return int(optimizer.iterations)


def test_a_loss_scale_outside_of_the_set_takes_its_own_steps():
    assert run_ranks(fit_outside_of_a_set, 3, timeout_s=100) == [3, 3, 3]
