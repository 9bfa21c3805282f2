"""Keras's gradient accumulation: one reduction for each real update, on all ranks."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS, UPDATES = 4, 3
SHAPES = [(3, 5), (5,), (2,)]


def optimizer_of(kind):
    options = {"gradient_accumulation_steps": STEPS}
    if kind == "loss scale":
        inner = keras.optimizers.SGD(0.1, momentum=0.9, **options)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    return {
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, **options),
        "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.2, **options),
        "decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, **options),
        "global": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1, **options),
        "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, **options),
    }[kind]()


KINDS = ["momentum", "clipnorm", "decay", "global", "ema", "loss scale"]


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.normal(size=shape) for shape in SHAPES]


def trained(optimizer, gradients_of, eager=False, scale=1.0):
    """Variables and slots after all micro-batches."""
    variables = [
        tf.Variable(np.ones(shape), name=f"v{i}") for i, shape in enumerate(SHAPES)
    ]

    def step(grads):
        optimizer.apply(grads, variables)

    run = step if eager else tf.function(step)
    for number in range(STEPS * UPDATES):
        run([tf.constant(g * scale) for g in gradients_of(number)])
    state = variables + [v.value for v in optimizer.variables]
    return [np.asarray(v) for v in state]


@functools.cache
def alone(kind, size):
    """One process that is given the mean of the ranks' gradients."""

    def mean(number):
        parts = [gradients(rank, number) for rank in range(size)]
        return [sum(tensors) / size for tensors in zip(*parts, strict=True)]

    return trained(optimizer_of(kind), mean, scale=scale_of(kind))


def scale_of(kind):
    return 8.0 if kind == "loss scale" else 1.0


def train_ranks(kind, eager):
    native.take_records()
    optimizer = tfdist.DistributedOptimizer(optimizer_of(kind))
    state = trained(
        optimizer, lambda n: gradients(tfdist.rank(), n), eager, scale_of(kind)
    )
    names = [r["name"] for r in native.take_records() if r["kind"] == native.ALLREDUCE]
    return state, len([n for n in names if n.startswith("gradients.")])


@pytest.mark.parametrize(
    ("size", "eager", "kinds"),
    [
        pytest.param(2, True, ["loss scale"], id="2-eager"),
        pytest.param(2, False, ["global"], id="2-function"),
        pytest.param(2, True, KINDS, id="2-eager-all", marks=pytest.mark.slow),
        pytest.param(2, False, KINDS, id="2-all", marks=pytest.mark.slow),
        pytest.param(3, True, KINDS, id="3-eager", marks=pytest.mark.slow),
        pytest.param(3, False, KINDS, id="3-all", marks=pytest.mark.slow),
    ],
)
def test_the_mean_over_micro_batches_and_ranks_is_that_of_one_process(
    size, eager, kinds
):
    for kind in kinds:
        ranks = run_ranks(train_ranks, size, kind, eager)
        for state, reductions in ranks:
            assert reductions == UPDATES, kind
            # Gradients not reduced yet are each rank's own; here there are none.
            for a, b, first in zip(alone(kind, size), state, ranks[0][0], strict=True):
                assert b.tobytes() == first.tobytes(), kind
                np.testing.assert_allclose(
                    b, a, rtol=1e-6 if a.dtype == "float32" else 1e-12, err_msg=kind
                )


def train_with_gaps():
    """Rank 1 lacks the second gradient in every step, everybody the third."""
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    v = [tf.Variable(0.0, name=f"gap{i}") for i in range(3)]

    @tf.function
    def step():
        lacks = tfdist.rank() == 1
        optimizer.apply(
            [tf.constant(1.0), None if lacks else tf.constant(4.0), None], v
        )

    step()
    step()
    return [float(x) for x in v]


def test_a_gradient_that_one_rank_lacks_counts_as_zeros():
    for values in run_ranks(train_with_gaps, 2):
        assert values == [-1.0, -2.0, 0.0]


def train_with_an_overflow(eager):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    )
    v = tf.Variable(0.0)

    def step(g):
        optimizer.apply([g], [v])

    run = step if eager else tf.function(step)
    seen = []
    for number in range(1, 5):
        overflows = number == 2 and tfdist.rank() == 1
        value = (
            np.inf if overflows else float(optimizer.scale_loss(tf.constant(number)))
        )
        run(tf.constant(value, tf.float32))
        seen.append([float(v), float(optimizer.dynamic_scale), int(inner._iterations)])
    return seen


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_overflow_on_one_rank_leaves_that_micro_batch_out_on_all(eager):
    for seen in run_ranks(train_with_an_overflow, 2, eager):
        # The mean of batches 1 and 3; batch 4 waits for the next.
        assert seen == [[0.0, 8.0, 1], [0.0, 4.0, 1], [-2.0, 4.0, 2], [-2.0, 4.0, 3]]
