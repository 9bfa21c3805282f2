"""A gradient that is not finite on one rank: all ranks do the same with the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def train(policy, accumulate, eager, bad_steps, steps):
    """What is left after `steps`; on one rank in turn some of them are not finite."""
    options = {"gradient_accumulation_steps": 2} if accumulate else {}
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.Adam(0.1, weight_decay=0.1, use_ema=True, **options),
        nan_policy=policy,
    )
    v = [tf.Variable(np.ones(3), name="kernel"), tf.Variable(np.ones(()), name="bias")]

    def step(a, b):
        optimizer.apply([a, b], v)

    run = step if eager else tf.function(step)
    optimizer.build(v)
    untouched = 0
    for number in range(steps):
        bad = number in bad_steps and tfdist.rank() == number % tfdist.size()
        value = list(BAD.values())[number % 3] if bad else 1.0
        state = [np.asarray(x) for x in v + [s.value for s in optimizer.variables]]
        run(tf.constant([value, 1.0, 2.0], tf.float64), tf.constant(1.0, tf.float64))
        after = [np.asarray(x) for x in v + [s.value for s in optimizer.variables]]
        same = [a.tobytes() == b.tobytes() for a, b in zip(state, after, strict=True)]
        if number in bad_steps:
            untouched += all(same)
        else:
            assert not all(same)
    return untouched, after


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("accumulate", "eager"),
    [
        *((False, False), (True, True)),
        *(pytest.param(*case, marks=SLOW) for case in ((False, True), (True, False))),
    ],
)
def test_skip_step_leaves_weights_and_slots_untouched_on_all_ranks(accumulate, eager):
    steps = 20 if eager else 60
    bad_steps = list(range(1, steps, 2))
    ranks = run_ranks(train, 2, "skip_step", accumulate, eager, bad_steps, steps)
    for untouched, state in ranks:
        assert untouched == len(bad_steps)
        for a, b in zip(ranks[0][1], state, strict=True):
            assert a.tobytes() == b.tobytes()
            assert np.isfinite(a).all()


def train_until_it_raises(accumulate, eager):
    options = {"gradient_accumulation_steps": 2} if accumulate else {}
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, name="descent", **options), nan_policy="raise"
    )
    v = [tf.Variable([1.0], name="kernel"), tf.Variable(1.0, name="bias")]

    def step(a, b):
        optimizer.apply([a, b], v)

    run = step if eager else tf.function(step)
    run(tf.constant([1.0]), tf.constant(1.0))
    before = [x.numpy() for x in v + [optimizer._iterations]]
    try:
        run(tf.constant([np.nan if tfdist.rank() == 1 else 1.0]), tf.constant(1.0))
    except tf.errors.InvalidArgumentError as error:
        after = [x.numpy() for x in v + [optimizer._iterations]]
        return str(error), np.array_equal(before[0], after[0]), before[1:] == after[1:]
    return "no error", False, False


@pytest.mark.parametrize(
    ("accumulate", "eager"),
    [
        *((False, False), (True, True)),
        *(pytest.param(*case, marks=SLOW) for case in ((False, True), (True, False))),
    ],
)
def test_raise_is_an_error_on_all_ranks_before_a_variable_changes(accumulate, eager):
    ranks = run_ranks(train_until_it_raises, 2, accumulate, eager)
    for message, *untouched in ranks:
        assert "optimizer descent is not finite" in message
        assert "the nan_policy skip_step" in message
        assert untouched == [True, True]
    assert "kernel" in ranks[1][0]
    assert "bias" not in ranks[1][0]


def train_with_a_sum_that_overflows(policy, scaled, eager):
    """Values after each of two updates; in the first, only the sum is not finite."""
    optimizer = keras.optimizers.AdamW(
        0.5, weight_decay=0.5, gradient_accumulation_steps=2
    )
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    optimizer = tfdist.DistributedOptimizer(
        optimizer, nan_policy=policy, compression="fp16"
    )
    v = tf.Variable([1.0, 1.0])
    optimizer.build([v])
    step = lambda g: optimizer.apply([g], [v])  # noqa: E731
    run = step if eager else tf.function(step)
    seen, error = [], ""
    # Each of the ranks' gradients is finite, but too large for float16.
    for value in (1e6, 1e6, 1.0, 1.0):
        try:
            run(tf.constant([value, 1.0]))
        except tf.errors.InvalidArgumentError as raised:
            error = str(raised)
            break
        seen.append(v.numpy().tolist())
    slots = [x.numpy() for x in optimizer.variables if "momentum" in x.path]
    return seen, error, len(slots), all(np.isfinite(x).all() for x in slots)


@pytest.mark.parametrize("eager", [pytest.param(True, marks=SLOW), False])
@pytest.mark.parametrize(
    ("policy", "scaled"),
    [("skip_step", False), ("raise", False), (None, True)],
)
def test_a_sum_of_micro_batches_that_overflows_is_seen(policy, scaled, eager):
    ranks = run_ranks(train_with_a_sum_that_overflows, 2, policy, scaled, eager)
    for seen, error, *slots in ranks:
        assert slots == [1, True]
        if policy == "raise":
            assert seen == [[1.0, 1.0]]
            assert "is not finite; the step has not changed any variable" in error
        else:
            assert seen[:3] == [[1.0, 1.0]] * 3
            # Decay to 0.75, then a step of Adam of 0.5; the sum of 1e6 was dropped.
            np.testing.assert_allclose(seen[3], [0.25, 0.25], atol=1e-4)


def test_a_policy_has_to_be_known_and_a_loss_scale_has_its_own():
    tfdist.init()
    with pytest.raises(ValueError, match="None, 'raise' or 'skip_step', got 'ignore'"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), nan_policy="ignore")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="Omit nan_policy"):
        tfdist.DistributedOptimizer(scaled, nan_policy="skip_step")


def lars(in_graph, nan_policy):
    """The gradient of `table` has rows, which LARS makes dense within its `apply`."""
    table = tf.Variable(np.ones((6, 2)), name="table")
    bias = tf.Variable(np.ones(2), name="bias")
    optimizer = tfdist.DistributedOptimizer(
        tfdist.optimizers.LARS(0.1, weight_decay=0.01),
        sparse_as_dense=False,
        nan_policy=nan_policy,
    )

    def step(rows, factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(tf.gather(table, rows) ** 2 + bias)
        optimizer.apply(tape.gradient(loss, [table, bias]), [table, bias])

    run = tf.function(step) if in_graph else step
    optimizer.build([table, bias])
    for number in range(4):
        if number == 1 and nan_policy is None:
            continue
        factor = np.nan if number == 1 and tfdist.rank() == 1 else 1.0
        rows = tf.constant([number, number + 1 + tfdist.rank()])
        run(rows, tf.constant(factor, tf.float64))
    return [table.numpy(), bias.numpy()]


@pytest.mark.parametrize("in_graph", [pytest.param(False, marks=SLOW), True])
def test_skip_step_with_rows_of_a_table_and_an_apply_of_the_optimizers_own(in_graph):
    expected = run_ranks(lars, 2, False, None)[0]
    for found in run_ranks(lars, 2, in_graph, "skip_step"):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
