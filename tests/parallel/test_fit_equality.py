"""Several ranks end where one process with the whole batch ends.

Float64, 20 steps, no batch norm and no dropout. On every rank the same bits; against
one process the order of additions differs, so 1e-10 relative is allowed.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import run_ranks

import tfdist

STEPS, GLOBAL_BATCH = 20, 12
MODES = ("fit", "loop eagerly", "tape in a function")


def optimizers():
    return {
        "sgd": keras.optimizers.SGD(0.05),
        "momentum": keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": keras.optimizers.Adam(0.01),
        "adamw": keras.optimizers.AdamW(0.01, weight_decay=0.02),
    }


def samples():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(STEPS * GLOBAL_BATCH, 6))
    return x, np.stack([np.sin(x).sum(axis=1), x[:, 0] * x[:, 1]], axis=1)


def make_model(seed):
    keras.utils.clear_session()  # names of layers hold a count
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(7, activation="softplus"),
            keras.layers.Dense(2),
        ]
    )


def loss_of(model, x, y):
    return tf.reduce_mean(tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1))


def loop(model, optimizer, batches, use_tape, in_graph):
    variables = model.trainable_variables

    def step(x, y):
        tape = tfdist.DistributedGradientTape() if use_tape else tf.GradientTape()
        with tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(step) if in_graph else step
    for x, y in batches:
        step(x, y)


def train(mode, model, optimizer, batches, callbacks):
    if mode == "fit":
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(batches, verbose=0, callbacks=callbacks)
    else:
        in_function = mode == "tape in a function"
        loop(model, optimizer, batches, in_function, in_function)


def cases(every):
    """Pairs of an optimizer and a mode: all, or one of each mode."""
    pairs = [
        (name, mode, place + number)
        for place, name in enumerate(optimizers())
        for number, mode in enumerate(MODES)
    ]
    return [(name, mode) for name, mode, place in pairs if every or place % 4 == 0]


@in_float64
def train_ranks(every):
    found = {}
    for name, mode in cases(every):
        optimizer = optimizers()[name]
        model = make_model(seed=100 + tfdist.rank())  # rank 0's weights win
        batches = tfdist.data.shard(samples(), batch_size=GLOBAL_BATCH // tfdist.size())
        callbacks = []
        if mode != "tape in a function":
            optimizer = tfdist.DistributedOptimizer(optimizer)
        if mode == "fit":
            callbacks = [tfdist.callbacks.BroadcastInitialState()]
        else:
            optimizer.build(model.trainable_variables)
            tfdist.broadcast_variables(model.weights + optimizer.variables)
        train(mode, model, optimizer, batches, callbacks)
        found[f"{name}, {mode}"] = state_of(model, optimizer)
    return found


@in_float64
def train_alone(name):
    x, y = samples()
    model, optimizer = make_model(seed=100), optimizers()[name]
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    return state_of(model, optimizer)


@pytest.fixture(scope="module")
def alone():
    return functools.cache(train_alone)


@pytest.mark.parametrize(
    ("size", "every"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_weights_and_slots_are_those_of_one_process_on_the_whole_batch(
    size, every, alone
):
    ranks = run_ranks(train_ranks, size, every, timeout_s=110)
    assert len(ranks[0]) == (12 if every else 3)
    for case in ranks[0]:
        reference = alone(case.partition(",")[0])
        assert_like_one_process([r[case] for r in ranks], reference, case)


def train_unequal_ranks(mode):
    keras.utils.clear_session()
    keras.utils.set_random_seed(tfdist.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    if mode == "built":
        model.build((None, 4))
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1))
    options = {"run_eagerly": mode == "eager"}
    if mode == "steps_per_execution":
        options["steps_per_execution"] = 4
    model.compile(optimizer, "mse", jit_compile=False, **options)
    x = np.random.default_rng(3).normal(size=(37, 4)).astype("float32")
    data = tfdist.data.shard((x, x[:, :1]), batch_size=4, shuffle=True)
    model.fit(
        data,
        epochs=2,
        verbose=0,
        callbacks=[tfdist.callbacks.BroadcastInitialState(root=tfdist.size() - 1)],
    )
    return [v.numpy() for v in model.weights + optimizer.variables]


@pytest.mark.parametrize(
    "mode",
    [
        *("unbuilt", "steps_per_execution"),
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("built", "eager")),
    ],
)
def test_ranks_that_begin_differently_end_with_the_same_bits(mode):
    ranks = run_ranks(train_unequal_ranks, 3, mode)
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


def first_weights(root):
    """The weights that the first step sees, and those each rank began with."""

    class Probe(keras.Sequential):
        seen = None

        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "seen": logs["loss"]}

    keras.utils.clear_session()
    keras.utils.set_random_seed(tfdist.rank())
    model = Probe([keras.layers.Dense(1, use_bias=False)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", jit_compile=False)
    ones = np.ones((4, 3), "float32")
    model.fit(
        ones,
        ones[:, :1],
        verbose=0,
        callbacks=[tfdist.callbacks.BroadcastInitialState(root=root)],
    )
    # The rate is 0, so the weights are still those of the first step.
    keras.utils.set_random_seed(root)
    own = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    own.build((None, 3))
    return model.get_weights()[0], own.get_weights()[0]


@pytest.mark.parametrize("root", [0, 1])
def test_an_unbuilt_model_begins_with_the_roots_weights(root):
    for weights, of_root in run_ranks(first_weights, 2, root):
        np.testing.assert_array_equal(weights, of_root)


def train_mixed():
    """A non-finite gradient on one rank only, under a loss scale."""
    v = keras.Variable(np.ones(4, "float32"))
    inner = keras.optimizers.SGD(1.0)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    )

    @tf.function
    def step(g):
        optimizer.apply([g], [v])

    bad = np.inf if tfdist.rank() == 1 else 1.0
    step(tf.fill([4], tf.constant(8.0)))
    step(tf.fill([4], tf.constant(bad, tf.float32)))
    step(tf.fill([4], tf.constant(4.0)))
    return [v.numpy(), int(inner.iterations.numpy()), float(optimizer.dynamic_scale)]


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all():
    for values, iterations, scale in run_ranks(train_mixed, 2):
        np.testing.assert_array_equal(values, np.full(4, -1.0, "float32"))
        assert iterations == 2
        assert scale == 4.0
