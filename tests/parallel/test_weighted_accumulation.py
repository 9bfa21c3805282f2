"""weight= with gradient_accumulation_steps: the mean over all samples, exactly."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS, UPDATES = 3, 2
# Samples of each rank in each micro-batch.
SIZES = {
    "two": [[8, 24, 1], [5, 0, 16], [2, 7, 3], [11, 1, 1]],
    "one has none": [[4, 4, 2], [0, 0, 0], [1, 2, 3], [3, 2, 1]],
}


def samples(rank, update, micro, count):
    rng = np.random.default_rng([rank, update, micro])
    return rng.normal(size=(count, 4)), rng.normal(size=(count, 1))


def batches(sizes, update, rank):
    """The micro-batches of a rank for one update."""
    counts = sizes[2 * update + rank]
    return [samples(rank, update, i, n) for i, n in enumerate(counts)]


def new_optimizer(kind, steps):
    options = {"gradient_accumulation_steps": steps} if steps else {}
    if kind == "loss scale":
        inner = keras.optimizers.Adam(0.1, **options)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    if kind == "momentum":
        return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0, **options)
    return keras.optimizers.AdamW(0.1, global_clipnorm=0.5, **options)


def new_variables():
    rng = np.random.default_rng(0)
    kernel = keras.Variable(rng.normal(size=(4, 1)), name="kernel")
    return [kernel, keras.Variable(np.zeros(1), name="bias")]


def step_of(optimizer, variables):
    def step(x, y, weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] + variables[1] - y) ** 2)
            loss = optimizer.scale_loss(loss)
        grads = tape.gradient(loss, variables)
        options = {} if weight is None else {"weight": weight}
        optimizer.apply(grads, variables, **options)

    return step


@in_float64
def alone(sizes, kind):
    """One process, one batch of all samples for each update, no accumulation."""
    variables, optimizer = new_variables(), new_optimizer(kind, None)
    step = step_of(optimizer, variables)
    for update in range(UPDATES):
        parts = [b for rank in range(2) for b in batches(sizes, update, rank)]
        x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
        step(tf.constant(x), tf.constant(y), None)
    return [v.numpy() for v in variables]


@in_float64
def train(sizes, kind, eager):
    variables = new_variables()
    optimizer = tfdist.DistributedOptimizer(new_optimizer(kind, STEPS))
    run = step_of(optimizer, variables)
    if not eager:
        inner = run
        signature = [tf.TensorSpec([None, n], tf.float64) for n in (4, 1)]
        run = tf.function(
            lambda x, y, w: inner(x, y, tf.shape(x)[0]),
            input_signature=[*signature, tf.TensorSpec([], tf.int32)],
        )
    native.take_records()
    for update in range(UPDATES):
        for x, y in batches(sizes, update, tfdist.rank()):
            run(tf.constant(x), tf.constant(y), len(x))
    rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
    return [v.numpy() for v in variables], len(rows)


@pytest.mark.parametrize(
    ("name", "kind", "eager"),
    [
        ("two", "decay", False),
        ("one has none", "loss scale", True),
        pytest.param("two", "momentum", True, marks=pytest.mark.slow),
        pytest.param("two", "loss scale", False, marks=pytest.mark.slow),
        pytest.param("one has none", "decay", True, marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_one_process_with_all_samples(name, kind, eager):
    sizes = SIZES[name]
    ranks = run_ranks(train, 2, sizes, kind, eager)
    assert_like_one_process([state for state, _ in ranks], alone(sizes, kind), name)
    assert [reductions for _, reductions in ranks] == [UPDATES] * 2


def small(weights, policy=None):
    """Rank r's gradient is 1 + 2 r in the first, 5 in the second micro-batch."""
    v = tf.Variable(0.0)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), nan_policy=policy
    )
    own = weights[tfdist.rank()]
    grads = [1.0 + 2.0 * tfdist.rank(), 5.0]

    def step(g, w):
        g = tf.constant(np.nan if g is None else g, tf.float32)
        optimizer.apply([g], [v], **({} if w is None else {"weight": w}))

    found = outcome(lambda: [step(g, w) for g, w in zip(grads, own, strict=True)])
    return found.get("message", ""), float(v)


def test_the_mean_is_weighted():
    # (1 * 1 + 2 * 5 + 3 * 3 + 4 * 5) / 10
    for _, value in run_ranks(small, 2, [[1, 2], [3, 4]]):
        assert value == pytest.approx(-4.0, rel=1e-6)
    for _, value in run_ranks(small, 2, [[0, 0], [0.5, 0.5]]):
        assert value == pytest.approx(-4.0, rel=1e-6)
    for _, value in run_ranks(small, 2, [[0, 0], [0, 0]]):
        assert value == 0.0


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_bad_weight_of_one_rank_is_an_error_on_all(bad):
    for message, value in run_ranks(small, 2, [[1, 1], [bad, 2]]):
        assert "finite and at least 0" in message
        assert value == 0.0


def test_weights_on_one_rank_only_or_in_some_steps_only_are_errors():
    for message, _ in run_ranks(small, 2, [[1, 1], [None, None]]):
        assert "accumulated weighted" in message
    for message, _ in run_ranks(small, 2, [[1, None], [1, None]]):
        assert "pass a weight for every batch" in message


def skipped():
    """On rank 1 the second of three micro-batches is not finite: all leave it out."""
    v = tf.Variable(0.0)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
        nan_policy="skip_step",
    )

    @tf.function
    def step(g, w):
        optimizer.apply([g], [v], weight=w)

    rank = tfdist.rank()
    step(tf.constant(1.0), tf.constant(2))
    step(tf.constant(np.nan if rank else 7.0), tf.constant(100))
    step(tf.constant(5.0 + rank), tf.constant(3))
    return float(v)


def test_a_skipped_batch_does_not_count():
    # Twice 2 of 1, and 3 of 5 and of 6.
    np.testing.assert_allclose(run_ranks(skipped, 2), [-3.7] * 2, rtol=1e-6)


def continued():
    """Loads the state within an accumulation; and begins with weights within one."""
    found = []
    for loads in (True, False):
        v = tf.Variable(0.0, name="v")
        optimizer = tfdist.DistributedOptimizer(
            keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        )
        optimizer.build([v])
        first = {"weight": 7} if loads else {}
        optimizer.apply([tf.constant(100.0)], [v], **first)
        if loads:
            store = {}
            optimizer.save_own_variables(store)
            optimizer.load_own_variables(store)
        optimizer.apply([tf.constant(3.0 + tfdist.rank())], [v], weight=2)
        found.append(float(v))
    return found


def test_batches_whose_weights_are_not_known_are_left_out():
    assert run_ranks(continued, 2) == [[-3.5, -3.5]] * 2


def joined(counts):
    """Epochs with different numbers of batches on each rank, each with a broadcast."""
    v = keras.Variable(0.0, name="v")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    )
    optimizer.build([v])
    found = []
    for epoch in counts:
        for _ in range(epoch[tfdist.rank()]):
            optimizer.apply([tf.constant(1.0)], [v], weight=1)
        latest = tfdist.join()
        tfdist.broadcast_variables([v, *optimizer.variables], latest)
        found.append(float(v))
    return found


def test_after_a_join_no_rank_counts_batches_that_it_has_lost():
    # Rank 1 ends within the second update, and rank 0 completes it.
    assert run_ranks(joined, 2, [[6, 4], [3, 3]]) == [[-2.0, -3.0]] * 2
    # Both end within the second update, which then uses only its last batch.
    assert run_ranks(joined, 2, [[5, 4], [1, 1]]) == [[-1.0, -2.0]] * 2
