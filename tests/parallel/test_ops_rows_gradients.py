"""Gradients on several ranks against those of one process that holds all inputs.

What is differentiated is the sum of all ranks' losses.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.one_process import outputs
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp

SIZE = 3
SHAPES = {
    "allgather": [(2, 2), (0, 2), (3, 2)],
    "gather": [(2, 2), (0, 2), (3, 2)],
    "scatter": [(1, 2), (7, 2), (0, 2)],
    "alltoall": [(3, 2), (6, 2), (1, 2)],
    "reduce_scatter": [(7, 2)] * 3,
    "reduce": [(4, 2)] * 3,
    "broadcast": [(4, 2)] * 3,
}
SPLITS = {
    "alltoall": [[1, 0, 2], [3, 3, 0], [0, 1, 0]],
    "scatter": [2, 5, 0],
    "reduce_scatter": [3, 0, 4],
}
ROOT = 1


def values(rank, shape):
    return np.random.default_rng([rank, *shape]).standard_normal(shape)


def loss_of(rank, y):
    weights = tf.constant(values(rank + 100, (30, 2)))
    return tf.reduce_sum(y**3 * weights[: tf.shape(y)[0]]) * (rank + 1)


def call(kind, x, op, scales):
    if kind == "allgather":
        return tfdist.allgather(x)
    if kind == "gather":
        return tfdist.gather(x, ROOT)
    if kind == "scatter":
        return tfdist.scatter(x, ROOT, SPLITS[kind])
    if kind == "alltoall":
        return tfdist.alltoall(x, SPLITS[kind][tfdist.rank()])[0]
    if kind == "broadcast":
        return tfdist.broadcast(x, ROOT)
    if kind == "reduce":
        return tfdist.reduce(x, ROOT, op=op, **scales)
    return tfdist.reduce_scatter(x, SPLITS[kind], op=op, **scales)


def gradient(kind, op, scales, compiled, joined=None):
    rank = tfdist.rank()
    if rank == joined:
        tfdist.join()
        return None

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(rank, call(kind, x, ReduceOp(op), scales))
        return tape.gradient(loss, x)

    x = tf.constant(values(rank, SHAPES[kind][rank]))
    found = (tf.function(run) if compiled else run)(x).numpy()
    if joined is not None:
        tfdist.join()
    return found


def expected_gradients(kind, scale, joined=None):
    xs = [tf.constant(values(r, shape)) for r, shape in enumerate(SHAPES[kind])]
    splits = SPLITS.get(kind)
    if joined is not None:  # it gives no rows, or zeros
        has_rows = kind in ("allgather", "gather", "alltoall")
        xs[joined] = xs[joined][:0] if has_rows else tf.zeros_like(xs[joined])
        if kind == "alltoall":
            splits = [[0] * SIZE if r == joined else s for r, s in enumerate(splits)]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        ys = outputs(
            kind,
            xs,
            lambda parts: tf.concat(parts, axis=0),
            splits=splits,
            root=ROOT,
            scale=scale,
        )
        loss = tf.add_n([loss_of(r, y) for r, y in enumerate(ys) if r != joined])
    gradients = tape.gradient(loss, xs, unconnected_gradients="zero")
    return [g.numpy() for g in gradients]


# A gradient is the same in a function: of two kinds the usual tests try that.
EACH = [
    pytest.param(kind, compiled, marks=[pytest.mark.slow] if is_slow else [])
    for kind in SHAPES
    for compiled in (False, True)
    for is_slow in [compiled and kind not in ("scatter", "alltoall")]
]


@pytest.mark.parametrize(("kind", "compiled"), EACH)
def test_the_gradient_is_that_of_one_process(kind, compiled):
    results = run_ranks(gradient, SIZE, kind, int(ReduceOp.SUM), {}, compiled)
    for got, want in zip(results, expected_gradients(kind, 1), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter"])
def test_the_average_and_factors_count(kind):
    scales = {"prescale": 0.5, "postscale": 3.0}
    results = run_ranks(gradient, SIZE, kind, int(ReduceOp.AVERAGE), scales, False)
    expected = expected_gradients(kind, 0.5 * 3.0 / SIZE)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(("kind", "compiled"), EACH)
def test_a_rank_that_has_joined_gives_nothing_and_does_not_count(kind, compiled):
    for joined in (0, 2):
        op, scale = ReduceOp.SUM, 1.0
        if kind in ("reduce", "reduce_scatter"):
            op, scale = ReduceOp.AVERAGE, 1 / (SIZE - 1)
        results = run_ranks(gradient, SIZE, kind, int(op), {}, compiled, joined)
        expected = expected_gradients(kind, scale, joined)
        for rank in {0, 1, 2} - {joined}:
            np.testing.assert_allclose(results[rank], expected[rank], rtol=1e-12)


def second_gradient(kind):
    """Of the sum of squares of a gradient: every rank takes part in each of the two."""
    x = tf.random.stateless_normal([SIZE * 2, 2], (5, tfdist.rank()), dtype=tf.float64)
    rooted = {"root": ROOT} if kind == "scatter" else {}
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = getattr(tfdist, kind)(x * x, **rooted)
            y = y[0] if isinstance(y, tuple) else y
            loss = tf.reduce_sum(y * y)
        first = inner.gradient(loss, x)
        second = tf.reduce_sum(first * first)
    return outer.gradient(second, x).numpy()


@pytest.mark.parametrize("kind", ["scatter", "alltoall"])
def test_a_gradient_of_a_gradient_waits_for_nobody(kind):
    xs = [
        tf.random.stateless_normal([SIZE * 2, 2], (5, rank), dtype=tf.float64).numpy()
        for rank in range(SIZE)
    ]
    found = run_ranks(second_gradient, SIZE, kind, timeout_s=40)
    for rank, (got, x) in enumerate(zip(found, xs, strict=True)):
        # Rows keep their values wherever they go: x^4, then (4 x^3)^2.
        want = 96.0 * x**5 if kind == "alltoall" or rank == ROOT else 0.0 * x
        np.testing.assert_allclose(got, want, rtol=1e-12)


def scalars():
    """A scalar is one row; its gradient is a scalar again."""
    rank = tfdist.rank()
    x = tf.constant(2.0 + rank)
    results = []
    for function in (
        tfdist.allgather,
        tfdist.gather,
        tfdist.scatter,
        lambda x: tfdist.reduce_scatter(x, op=ReduceOp.SUM),
        lambda x: tfdist.reduce(x, op=ReduceOp.SUM),
        lambda x: tfdist.alltoall(x, [0, 1])[0],
    ):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x)) * (rank + 1)
        results.append(tape.gradient(loss, x).numpy().tolist())
    return results


def test_scalars_have_scalar_gradients():
    first, second = run_ranks(scalars, 2)
    # The losses count 1 on rank 0 and 2 on rank 1.
    assert first == [3.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    assert second == [3.0, 1.0, 0.0, 1.0, 3.0, 2.0]


def results_that_are_not_used():
    """Every rank takes part in the gradient, also one whose own result has none."""
    rank = tfdist.rank()
    x = tf.constant([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tfdist.reduce(x, 0, op=ReduceOp.SUM)
        loss = tf.reduce_sum(y * y) if rank == 0 else 0.0 * tf.reduce_sum(y)
    return tape.gradient(loss, x).numpy().tolist()


def test_a_loss_on_the_root_alone_reaches_all_ranks():
    assert run_ranks(results_that_are_not_used, 2) == [[4.0, 8.0, 12.0]] * 2
