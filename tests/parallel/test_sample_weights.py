"""weight=: batches of unequal sizes train as one process on all samples does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

STEPS = 3
FEATURES = 6


def batch(sizes, step, rank=None):
    """The samples of a step: ids of an embedding, features, targets."""
    rng = np.random.default_rng([sum(sizes), step])
    ids = rng.integers(0, 9, sum(sizes))
    x, y = rng.normal(size=(sum(sizes), FEATURES)), rng.normal(size=(sum(sizes), 1))
    part = slice(None)
    if rank is not None:
        begin = sum(sizes[:rank])
        part = slice(begin, begin + sizes[rank])
    return [tf.constant(values[part]) for values in (ids, x, y)]


def train(sizes, mode, sparse_as_dense=None):
    """Variables and slots; sizes of the ranks' batches, or of one process's parts."""
    alone = mode == "alone"
    rng = np.random.default_rng(0)
    table = tf.Variable(rng.normal(size=(9, FEATURES)), name="table")
    kernel = tf.Variable(rng.normal(size=(FEATURES, 1)), name="kernel")
    unused = tf.Variable(0.5, name="unused", dtype="float64")
    variables = [table, kernel, unused]
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.5)
    if mode in ("optimizer", "apply_gradients", "eager"):
        optimizer = tfdist.DistributedOptimizer(
            optimizer, sparse_as_dense=sparse_as_dense
        )

    def step(ids, x, y):
        weight = tf.shape(y)[0]
        tape = tf.GradientTape()
        if mode == "tape":
            tape = tfdist.DistributedGradientTape(sparse_as_dense=sparse_as_dense)
        with tape:
            found = (tf.gather(table, ids) * x) @ kernel
            loss = tf.reduce_mean((found - y) ** 2)  # NaN where there are no samples
        if mode == "tape":
            grads = tape.gradient(loss, variables, weight=weight)
        else:
            grads = tape.gradient(loss, variables)
        if mode == "apply_gradients":
            optimizer.apply_gradients(zip(grads, variables, strict=True), weight=weight)
        elif mode in ("optimizer", "eager"):
            optimizer.apply(grads, variables, weight=weight)
        else:  # dense: Keras alone does not add up the duplicates of a table
            grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
            optimizer.apply(grads, variables)

    dims = ([None], [None, FEATURES], [None, 1])
    types = (tf.int64, tf.float64, tf.float64)
    signature = [tf.TensorSpec(d, t) for d, t in zip(dims, types, strict=True)]
    run = step if mode == "eager" else tf.function(step, input_signature=signature)
    for number in range(STEPS):
        run(*batch(sizes, number, None if alone else tfdist.rank()))
    return [np.asarray(v) for v in [*variables, *optimizer.variables]]


MODES = [
    *(("tape", False), ("tape", True), ("optimizer", False)),
    *(("apply_gradients", True), ("eager", False)),
]
# Each way of reducing once.
SAMPLE = [
    *(((7, 0), "tape", False), ((7, 0), "optimizer", False)),
    *(((5, 11, 16), "apply_gradients", True), ((5, 11, 16), "eager", False)),
]


@pytest.mark.parametrize(
    ("sizes", "mode", "sparse_as_dense"),
    [
        *SAMPLE,
        *(
            pytest.param(sizes, *mode, marks=pytest.mark.slow)
            for sizes in ((8, 24), (5, 11, 16), (7, 0))
            for mode in MODES
            if (sizes, *mode) not in SAMPLE
        ),
    ],
)
def test_unequal_batches_train_as_one_process_does(sizes, mode, sparse_as_dense):
    alone = train(sizes, "alone")
    ranks = run_ranks(train, len(sizes), list(sizes), mode, sparse_as_dense)
    for state in ranks:
        for a, b, first in zip(alone, state, ranks[0], strict=True):
            assert b.tobytes() == first.tobytes()
            tolerance = 1e-6 if a.dtype == np.float32 else 1e-10  # the learning rate
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=1e-14)


def one_step(weights):
    """The gradient 1 on rank 0 and 3 on rank 1, or the error."""
    v = tf.Variable(1.0)
    weight = weights[tfdist.rank()]
    with tfdist.DistributedGradientTape() as tape:
        loss = (1.0 + 2.0 * tfdist.rank()) * v
    try:
        return float(tape.gradient(loss, v, weight=weight))
    except (tf.errors.InvalidArgumentError, ValueError, tfdist.MismatchError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_mean_is_weighted():
    assert run_ranks(one_step, 2, [1, 3]) == [2.5, 2.5]
    assert run_ranks(one_step, 2, [0.0, 0.5]) == [3.0, 3.0]
    assert run_ranks(one_step, 2, [0, 0]) == [0.0, 0.0]


def half_losses(names):
    """The gradient of each loss is 1, which a mean of any weights leaves."""
    v = tf.Variable(1.0)
    with tfdist.DistributedGradientTape() as tape:
        losses = [tf.cast(v, name) for name in names]
    return float(tape.gradient(losses, v, weight=1 + tfdist.rank())) / len(losses)


@pytest.mark.parametrize(
    "names", [["bfloat16"], ["float16"], ["float16", "float32", "bfloat16"]]
)
def test_a_loss_of_a_half_type_rounds_no_weight(names):
    for gradient in run_ranks(half_losses, 2, names):
        assert gradient == pytest.approx(1.0, rel=2**-22)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_of_one_rank_is_an_error_on_all(bad):
    for message in run_ranks(one_step, 2, [4.0, bad]):
        assert "finite and at least 0" in message


def test_a_weight_on_one_rank_only_is_an_error_on_all():
    for message in run_ranks(one_step, 2, [4.0, None]):
        assert message.startswith("MismatchError")
        assert "weighted" in message


def later_without(how):
    """Steps without weights and with them, then one where only rank 0 gives one."""
    v = tf.Variable(1.0)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for weight in (None, 2.0, 2.0 if tfdist.rank() == 0 else None):
        try:
            if how == "tape":
                with tfdist.DistributedGradientTape() as tape:
                    loss = v * v
                tape.gradient(loss, v, weight=weight)
            else:
                optimizer.apply([tf.constant(1.0)], [v], weight=weight)
        except tfdist.MismatchError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("how", ["tape", "optimizer"])
def test_a_later_eager_step_that_one_rank_takes_without_a_weight_is_named(how):
    for message in run_ranks(later_without, 2, how, env={"TFDIST_TIMEOUT_S": "30"}):
        assert 'for rank 1 ("weight= (of all ranks or of none)")' in message


def test_what_a_weight_cannot_be_combined_with_is_refused():
    tfdist.init()
    v = tf.Variable([1.0])
    summing = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.1), op=tfdist.ReduceOp.SUM
    )
    with pytest.raises(ValueError, match="AVERAGE with weight"):
        summing.apply([tf.constant([1.0])], [v], weight=3)
    adding = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), op=tfdist.ReduceOp.SUM
    )
    with pytest.raises(ValueError, match="AVERAGE with weight"):
        adding.apply([tf.constant([1.0])], [v], weight=3)
    for scale in (lambda one: one, keras.optimizers.LossScaleOptimizer):
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        several = keras.optimizers.MultiOptimizer(lambda _, inner=inner: inner)
        scaled = tfdist.DistributedOptimizer(scale(several))
        with pytest.raises(ValueError, match="means of steps with different weights"):
            scaled.apply([tf.constant([1.0])], [v], weight=3)
    plain = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="single number"):
        plain.apply([tf.constant([1.0])], [v], weight=tf.constant([1.0, 2.0]))
    assert v.numpy() == [1.0]
