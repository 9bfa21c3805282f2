"""Every optimizer of Keras and tfdist trains on several ranks as in one process."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import run_ranks

import tfdist

STEPS, GLOBAL_BATCH = 4, 12
OTHER = {  # those that are made of another optimizer
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01)
    ),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.01), {".*first/.*": keras.optimizers.SGD(0.05)}
        )
    ),
}
OURS = {
    name: functools.partial(
        getattr(tfdist.optimizers, name),
        tfdist.optimizers.Warmup(0.1, 3, start=0.5),
        weight_decay=0.01,
        momentum_correction=name == "MomentumSGD",
    )
    for name in ("LARS", "MomentumSGD")
}
OURS["LAMB"] = functools.partial(tfdist.optimizers.LAMB, 0.01, weight_decay=0.01)
OURS["RMSpropWarmup"] = functools.partial(
    tfdist.optimizers.RMSpropWarmup, 0.1, center_steps=3, period_steps=4
)
NAMES = sorted(
    name
    for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(cls, keras.optimizers.Optimizer)
    and cls is not keras.optimizers.Optimizer
)


def make(name):
    if name in OTHER | OURS:
        return (OTHER | OURS)[name]()
    cls = getattr(keras.optimizers, name)
    options = {"exclude_embeddings": False} if name == "Muon" else {}
    return cls(learning_rate=0.01, **options)


def test_the_list_is_that_of_keras():
    assert len(NAMES) >= 16
    assert {"SGD", "Adam", "Muon", "Lamb", "Adafactor", "ScheduleFreeAdamW"} < {*NAMES}
    assert set(OTHER) <= set(NAMES)


@in_float64
def train(name, ranked):
    """A table of rows that are looked up twice, matrices, vectors."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(100 + (tfdist.rank() if ranked else 0))
    size, rank = (tfdist.size(), tfdist.rank()) if ranked else (1, 0)
    rng = np.random.default_rng(7)
    x = rng.integers(0, 9, size=(STEPS * GLOBAL_BATCH, 3))
    y = np.sin(x.sum(axis=1, keepdims=True) + rng.normal(size=(len(x), 2)))
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            keras.layers.Embedding(9, 4, name="first"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    optimizer = make(name)
    if ranked:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    if ranked:
        tfdist.broadcast_variables(model.weights + optimizer.variables)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_mean((model(x) - y) ** 2, axis=1))
            loss = optimizer.scale_loss(loss)
        grads = tape.gradient(loss, variables)
        if not ranked:  # Keras does not sum the gradients of a row that occurs twice
            grads = [tf.convert_to_tensor(g) for g in grads]
        optimizer.apply(grads, variables)

    data = tfdist.data.shard(
        (x, y), batch_size=GLOBAL_BATCH // size, rank=rank, size=size
    )
    for batch in data:
        step(*batch)
    optimizer.finalize_variable_values(variables)
    return state_of(model, optimizer)


def train_ranked(names):
    return {name: train(name, True) for name in names}


SOME = ["Nadam", "MomentumSGD"]
PARTS = [(NAMES + sorted(OURS))[part::6] for part in range(6)]


@pytest.mark.parametrize(
    "names",
    [SOME, *(pytest.param(names, marks=pytest.mark.slow) for names in PARTS)],
    ids=["some", *map(str, range(6))],
)
def test_ranks_end_where_one_process_with_all_data_ends(names):
    ranks = run_ranks(train_ranked, 2, names, timeout_s=100)
    for name in names:
        alone = train(name, False)
        assert_like_one_process([found[name] for found in ranks], alone, name)


class Signs(keras.optimizers.SGD):
    """Takes half the sign of a gradient, and halves the weights after the step."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(0.5 * tf.sign(g), v) for g, v in grads_and_vars]
        super().apply_gradients(pairs)
        for _, v in pairs:
            v.assign(0.5 * v)


# Gradients of both ranks by steps; what becomes of a weight of 1.
OWN_ENTRY = [
    ({}, {}, [(3.0, -1.0)], None, (1 - 0.5) / 2),
    ({}, {}, [(3.0, -1.0)], (1.0, 7.0), (1 + 0.5) / 2),
    ({}, {"nan_policy": "skip_step"}, [(3.0, np.nan)], None, 1.0),
    ({}, {"nan_policy": "raise"}, [(3.0, -1.0)], None, (1 - 0.5) / 2),
    (
        {"gradient_accumulation_steps": 2},
        {},
        [(3.0, 2.0), (1.0, -1.0)],
        None,
        (1 / 2 - 0.25) / 2,
    ),
    (
        {"gradient_accumulation_steps": 2},
        {},
        [(3.0, 2.0), (1.0, -1.0)],
        (1.0, 3.0),
        (1 / 2 - 0.125) / 2,
    ),
]


def own_entries(in_graph):
    found = []
    for options, ours, steps, weights, _ in OWN_ENTRY:
        optimizer = tfdist.DistributedOptimizer(Signs(1.0, **options), **ours)
        v = tf.Variable(1.0)
        own = {} if weights is None else {"weight": weights[tfdist.rank()]}

        def step(grad, optimizer=optimizer, v=v, own=own):
            optimizer.apply_gradients([(grad, v)], **own)

        optimizer.build([v])
        run = tf.function(step) if in_graph else step
        for grads in steps:
            run(tf.constant(grads[tfdist.rank()]))
        found.append(float(v))
    return found


@pytest.mark.parametrize(
    "in_graph", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_an_apply_gradients_of_the_class_is_given_reduced_gradients(in_graph):
    expected = [after for *_, after in OWN_ENTRY]
    assert run_ranks(own_entries, 2, in_graph) == [expected] * 2
