"""Variables that belong to one rank alone: as one process that has those of all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives.local_variables import LocalVariables
from tfdist.core import native
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.reduction import reduce_gradients

STEPS = 4
COUNTS = [3, 5]  # samples of each rank; rank r's own variable has r + 2 elements


def shared_variable():
    return keras.Variable(np.array([1.0, 2.0]), name="shared")


def own_variable(rank):
    return keras.Variable(np.full(rank + 2, 0.5 + rank), name="own")


def loss_of(rank, step, shared, own):
    """The mean over the samples of a rank."""
    x = np.random.default_rng([rank, step]).normal(size=(COUNTS[rank], rank + 2))
    return tf.reduce_mean((tf.linalg.matvec(x, own) - tf.reduce_sum(shared)) ** 2)


def optimizer_of(mode):
    steps = 2 if mode == "accumulation" else None
    return keras.optimizers.Adam(0.1, clipnorm=0.5, gradient_accumulation_steps=steps)


@in_float64
def alone(mode):
    """The weighted mean of the ranks' losses in one process."""
    shared, owns = shared_variable(), [own_variable(rank) for rank in range(2)]
    optimizer = optimizer_of(mode)
    weights = [c / 8 for c in COUNTS] if "weight" in mode else [0.5, 0.5]
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            losses = [loss_of(r, step, shared, owns[r]) for r in range(2)]
            loss = sum(w * one for w, one in zip(weights, losses, strict=True))
        variables = [shared, *owns]
        grads = tape.gradient(loss, variables)
        optimizer.apply(grads, variables)
    return [v.numpy() for v in variables]


@in_float64
def train(mode):
    rank = tfdist.rank()
    shared, own = shared_variable(), own_variable(rank)
    variables = [own, shared]
    optimizer = optimizer_of(mode)
    weight = COUNTS[rank] if "weight" in mode else None
    if "tape" in mode:
        make = lambda: tfdist.DistributedGradientTape(local_variables=[own])  # noqa: E731
    else:
        make = tf.GradientTape
        optimizer = tfdist.DistributedOptimizer(
            optimizer, local_variables=lambda v: v.path == "own"
        )
    optimizer.build(variables)

    def step(number):
        with make() as tape:
            loss = loss_of(rank, number, shared, own)
        options = {} if weight is None else {"weight": weight}
        if "tape" in mode:
            grads = tape.gradient(loss, variables, **options)
            optimizer.apply(grads, variables)
        else:
            optimizer.apply(tape.gradient(loss, variables), variables, **options)

    native.take_records()
    for number in range(STEPS):
        (step if "eager" in mode else tf.function(step))(number)
    rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
    return [shared.numpy()], own.numpy(), sum(row["bytes"] for row in rows)


@pytest.mark.parametrize(
    "mode",
    [
        "tape weight",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("optimizer", "eager", "tape", "weight eager", "accumulation")
        ),
    ],
)
def test_it_trains_as_one_process_that_has_the_variables_of_all(mode):
    ranks = run_ranks(train, 2, mode)
    shared, *owns = alone(mode)
    assert_like_one_process([r[0] for r in ranks], [shared], mode)
    for (_, own, sent), expected in zip(ranks, owns, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-10)
        updates = STEPS // 2 if mode == "accumulation" else STEPS
        assert sent == updates * 2 * 8  # two float64 numbers; the own ones stay here


def without_gradient(steps, eager):
    """Rank 1 never has a gradient of its local variable."""
    shared, own = (keras.Variable([1.0], name=name) for name in ("shared", "own"))
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps),
        local_variables=[own],
    )
    optimizer.build([shared, own])
    rank = tfdist.rank()

    def step(gradient):
        grads = [gradient, None if rank == 1 else gradient]
        optimizer.apply(grads, [shared, own])

    run = step if eager else tf.function(step)
    for _ in range(4 * (steps or 1)):
        run(tf.constant([1.0 + rank]))
    return float(shared[0]), float(own[0])


@pytest.mark.parametrize("eager", [True, False])
def test_a_local_gradient_may_be_none_on_some_ranks_when_accumulating(eager):
    plain = run_ranks(without_gradient, 2, None, eager)
    assert plain == [[1 - 4 * 1.5, 1 - 4 * 0.5], [1 - 4 * 1.5, 1.0]]
    assert run_ranks(without_gradient, 2, 2, eager) == plain


def scales(op, scale):
    rank = tfdist.rank()
    layer = keras.layers.Dense(1, use_bias=False)  # not built yet
    shared = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones((1, 1))) * (rank + 1.0) + shared * 2.0)
    variables = [layer.kernel, shared]
    options = ReduceOptions(
        tfdist.ReduceOp(op),
        local_variables=LocalVariables([layer]),
        scale_local_gradients=scale,
    )
    own, common = reduce_gradients(tape.gradient(loss, variables), variables, options)
    return [float(own[0, 0]), float(common[0])]


def test_local_gradients_are_scaled_like_the_others_unless_told_not_to():
    average, total = int(tfdist.ReduceOp.AVERAGE), int(tfdist.ReduceOp.SUM)
    assert run_ranks(scales, 2, average, True) == [[0.5, 2.0], [1.0, 2.0]]
    assert run_ranks(scales, 2, average, False) == [[1.0, 2.0], [2.0, 2.0]]
    assert run_ranks(scales, 2, total, True) == [[1.0, 4.0], [2.0, 4.0]]


def one_rank_only():
    """Rank 1 has a local variable, which the others reduce."""
    v = [tf.Variable([1.0], name="kernel"), tf.Variable([1.0], name="bias")]
    own = v[:1] if tfdist.rank() == 1 else []
    with tfdist.DistributedGradientTape(local_variables=own) as tape:
        loss = tf.reduce_sum(v[0] + v[1])
    return outcome(lambda: tape.gradient(loss, v))


def test_ranks_that_disagree_about_it_are_told_at_once():
    for found in run_ranks(one_rank_only, 2):
        assert found["class"] == "MismatchError"
        assert "kernel:0 local" in found["message"]


def not_finite(policy):
    """The own gradient of rank 1 is a NaN, which the reduction does not spread."""
    shared, own = tf.Variable([1.0]), tf.Variable([1.0])
    inner = keras.optimizers.SGD(0.1)
    if policy is None:
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer = tfdist.DistributedOptimizer(
        inner, local_variables=[own], nan_policy=policy
    )
    optimizer.build([shared, own])
    bad = tf.constant([np.nan if tfdist.rank() == 1 else 1.0], tf.float32)
    found = outcome(lambda: optimizer.apply([tf.constant([1.0]), bad], [shared, own]))[
        "class"
    ]
    return found, float(shared[0]), float(own[0])


@pytest.mark.parametrize(
    "policy",
    [
        "skip_step",
        *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("raise", None)),
    ],
)
def test_a_local_gradient_that_is_not_finite_is_known_to_all_ranks(policy):
    error = "InvalidArgumentError" if policy == "raise" else "none"
    assert run_ranks(not_finite, 2, policy) == [[error, 1.0, 1.0]] * 2


def broadcast_and_trained(way, eager):
    """Steps after a broadcast of all variables: Adam's slots of `own` then differ."""
    own = keras.Variable(np.ones((2, 2), "float32"), name="own")
    shared = keras.Variable(np.ones((2, 1), "float32"), name="shared")
    inner = keras.optimizers.Adam(0.1, use_ema=True)
    options = {"local_variables": [own]}
    in_tape = way == "tape"
    optimizer = inner if in_tape else tfdist.DistributedOptimizer(inner, **options)
    make = tfdist.DistributedGradientTape if in_tape else tf.GradientTape
    optimizer.build([own, shared])
    tfdist.broadcast_variables([own, shared, *optimizer.variables])

    def step(x):
        with make(**(options if in_tape else {})) as tape:
            loss = tf.reduce_mean(tf.square(x @ own @ shared))
        optimizer.apply(tape.gradient(loss, [own, shared]), [own, shared])

    run = step if eager else tf.function(step)
    for number in range(4):
        run(tf.fill([1, 2], 1.0 + number + tfdist.rank()))
    return own.numpy(), shared.numpy()


@pytest.mark.parametrize("way", ["optimizer", "tape"])
@pytest.mark.parametrize("eager", [True, False])
def test_slots_of_local_variables_are_not_compared(way, eager):
    (own, shared), (other, same) = run_ranks(broadcast_and_trained, 2, way, eager)
    assert (own != other).all()
    assert shared.tobytes() == same.tobytes()


def begun():
    keras.utils.set_random_seed(tfdist.rank())
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)]
    )
    own = model.layers[0]
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.Adam(0.1), local_variables=[own]
    )
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.full((4, 2), 1.0 + tfdist.rank(), "float32")
    at_first = []
    see = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: at_first.extend(w.numpy() for w in own.weights)
    )
    callbacks = [tfdist.callbacks.BroadcastInitialState(), see]
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    parts = [at_first, [w.numpy() for w in own.weights]]
    parts.append([w.numpy() for w in model.layers[1].weights])
    return [b"".join(w.tobytes() for w in part) for part in parts]


@pytest.mark.slow
def test_in_fit_they_begin_alike_and_go_their_own_way():
    (first, own, shared), (other_first, other_own, other_shared) = run_ranks(begun, 2)
    assert first == other_first
    assert own != other_own
    assert shared == other_shared
