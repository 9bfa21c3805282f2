"""Values of the operations on 2 to 4 ranks, bit by bit, and their gradients.

Inputs are small whole numbers, whose sums every type holds exactly, so that results
can be compared with NumPy bitwise.
"""

import doctest

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist import collectives
from tfdist.collectives import ReduceOp

REDUCIBLE = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
OTHERS = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "uint64"),
    *("complex64", "complex128"),
]
# The whole table of types and operations: test_reduce_cells.py.
OPS = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX]
SHAPES = [(), (0,), (1,), (2,), (3,), (5,), (7, 3), (3, 0, 2), (33, 17), (5000,)]


def numbers(rank, shape, dtype):
    """Whole numbers from -9 to 9, different on every rank; none below 0 if unsigned."""
    rng = np.random.default_rng([rank, len(shape), sum(shape)])
    values = rng.integers(-9, 10, shape)
    if np.dtype(dtype).kind in "ub":
        values = np.abs(values)
    return values.astype(dtype)


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)
    assert actual.tobytes() == expected.tobytes()


# ---- allreduce ----

FACTORS = {"prescale": 0.5, "postscale": 3.0}


def allreduce_everything(scaled):
    results = []
    factors = FACTORS if scaled else {}
    for dtype in REDUCIBLE:
        if scaled and dtype.startswith("int"):
            continue
        for shape in SHAPES:
            x = tf.constant(numbers(tfdist.rank(), shape, dtype))
            for op in OPS:
                results.append(tfdist.allreduce(x, op=op, **factors).numpy())
    return results


def reference(op, inputs, *, prescale=1.0, postscale=1.0):
    dtype = inputs[0].dtype
    wide = [np.asarray(x, np.float64) * prescale for x in inputs]
    if op is ReduceOp.MIN:
        result = np.minimum.reduce(wide)
    elif op is ReduceOp.MAX:
        result = np.maximum.reduce(wide)
    else:
        result = np.add.reduce(wide)
        if op is ReduceOp.AVERAGE:
            result = result / len(inputs)
            if dtype.kind in "iu":
                result = np.trunc(result)
    return np.asarray(result * postscale).astype(dtype)


@pytest.mark.parametrize(
    ("size", "scaled"),
    [
        *((3, False), (4, False), (3, True)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, False), (2, True), (4, True))
        ),
    ],
)
def test_allreduce_matches_numpy_for_every_type_operation_and_shape(size, scaled):
    by_rank = run_ranks(allreduce_everything, size, scaled)
    factors = FACTORS if scaled else {}
    index = 0
    for dtype in REDUCIBLE:
        if scaled and dtype.startswith("int"):
            continue
        for shape in SHAPES:
            inputs = [numbers(r, shape, dtype) for r in range(size)]
            for op in OPS:
                for result in by_rank:
                    same(result[index], by_rank[0][index])
                exact = op is not ReduceOp.AVERAGE or size in (2, 4)
                expected = reference(op, inputs, **factors)
                if exact:
                    # -0.0 and 0.0 are equal numbers with different bits.
                    np.testing.assert_array_equal(by_rank[0][index], expected)
                else:
                    np.testing.assert_allclose(
                        by_rank[0][index].astype(np.float64),
                        expected.astype(np.float64),
                        rtol={"bfloat16": 8e-3, "float16": 1e-3}.get(dtype, 1e-6),
                    )
                index += 1
    assert index == len(by_rank[0])


def grouped(size_of_one):
    rank = tfdist.rank()
    xs = [tf.fill([n], float(rank + n)) for n in range(1, size_of_one)]
    xs.insert(2, tf.constant(rank, tf.int64))
    eager = tfdist.grouped_allreduce(xs, op=ReduceOp.SUM)
    traced = tf.function(lambda *v: tfdist.grouped_allreduce(v, op=ReduceOp.SUM))(*xs)
    return [[y.numpy() for y in ys] for ys in (eager, traced)]


@pytest.mark.parametrize(
    "threshold", [pytest.param("0", marks=pytest.mark.slow), "64", "67108864"]
)
def test_grouped_allreduce_gives_every_tensor_its_own_sum(threshold):
    env = {"TFDIST_FUSION_BYTES": threshold}
    for eager, traced in run_ranks(grouped, 3, 20, env=env):
        assert eager[2] == traced[2] == 3
        for ys in (eager, traced):
            del ys[2]
            for n, y in enumerate(ys, start=1):
                assert y.tolist() == [3.0 + 3 * n] * n


def half_sums():
    rng = np.random.default_rng(tfdist.rank())
    x = rng.standard_normal(3001).astype(np.float16)
    return x, tfdist.allreduce(x, op=ReduceOp.SUM).numpy()


def test_half_results_are_the_once_rounded_sum():
    results = run_ranks(half_sums, 4)
    inputs = [x.astype(np.float32) for x, _ in results]
    # Ranks are added in their order, in float32.
    expected = inputs[0]
    for x in inputs[1:]:
        expected = expected + x
    for _, y in results:
        same(y, expected.astype(np.float16))


def example_on_two_ranks():
    tf_ = tf  # the example's names
    x = tf_.constant([[1.0, 2.0, 3.0], [1.0, 0.0, 1.0]])[tfdist.rank()]
    text = ">>> tfdist.allreduce(x, op=tfdist.ReduceOp.SUM).numpy().tolist()\n"
    text += "[2.0, 2.0, 4.0]\n"
    test = doctest.DocTestParser().get_doctest(
        text, {"tfdist": tfdist, "x": x}, "two ranks", None, None
    )
    return doctest.DocTestRunner().run(test).failed


def test_the_example_of_two_ranks_holds():
    assert "`[2, 2, 4]` on both" in collectives.allreduce.__doc__
    assert run_ranks(example_on_two_ranks, 2) == [0, 0]


def small_tensors_of_a_group():
    x = tf.constant([1e8, 1.0, -1e8][tfdist.rank()])
    return [float(y) for y in tfdist.grouped_allreduce([x, x, x], op=ReduceOp.SUM)]


def test_small_tensors_of_a_group_are_spread_over_the_ranks():
    # A ring begins at another rank for each slice, and these sums tell where.
    results = run_ranks(
        small_tensors_of_a_group, 3, env={"TFDIST_ALLREDUCE_ALGORITHM": "ring"}
    )
    assert results == [results[0]] * 3
    assert sorted(results[0]) == [0.0, 0.0, 1.0]


# ---- allgather and broadcast ----


def rows_of(rank, dtype):
    return [
        numbers(rank, (), dtype),
        numbers(rank, (rank,), dtype),  # none on rank 0
        numbers(rank, (3 - rank % 3, 2), dtype),
        numbers(rank, (0, 4), dtype),
        numbers(rank, (2 * rank, 0), dtype),
    ]


def allgather_everything():
    return [
        tfdist.allgather(tf.constant(x)).numpy()
        for dtype in REDUCIBLE + OTHERS
        for x in rows_of(tfdist.rank(), dtype)
    ]


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_allgather_concatenates_unequal_numbers_of_rows_in_rank_order(size):
    by_rank = run_ranks(allgather_everything, size)
    index = 0
    for dtype in REDUCIBLE + OTHERS:
        for parts in zip(*(rows_of(r, dtype) for r in range(size)), strict=True):
            expected = np.concatenate([np.atleast_1d(part) for part in parts])
            for result in by_rank:
                same(result[index], expected)
            index += 1


def broadcast_everything(root):
    return [
        tfdist.broadcast(tf.constant(numbers(tfdist.rank(), shape, dtype)), root)
        .numpy()
        .copy()
        for dtype in REDUCIBLE + OTHERS
        for shape in SHAPES
    ]


@pytest.mark.parametrize(
    ("size", "root"),
    [(2, 1), (3, 0), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_broadcast_gives_all_ranks_the_bits_of_the_root(size, root):
    by_rank = run_ranks(broadcast_everything, size, root)
    expected = [numbers(root, s, d) for d in REDUCIBLE + OTHERS for s in SHAPES]
    for results in by_rank:
        for result, value in zip(results, expected, strict=True):
            same(result, value)


def grouped_broadcast():
    rank = float(tfdist.rank())
    xs = [tf.fill([3], rank), tf.constant(tfdist.rank()), tf.fill([2], rank + 0.5)]
    return [y.numpy() for y in collectives.grouped_broadcast(xs, 1)]


def test_grouped_broadcast_keeps_order_and_types():
    for ys in run_ranks(grouped_broadcast, 3):
        assert [y.tolist() for y in ys] == [[1.0] * 3, 1, [1.5] * 2]


# ---- gradients ----


def losses(compiled):
    rank = tfdist.rank()
    x = tf.constant(numbers(rank, (2 + rank, 3), "float64"))  # unequal rows
    v = tf.constant(numbers(rank + 10, (4,), "float64"))
    weights = tf.constant(numbers(20, (100, 3), "float64"))

    def run(x, v):
        with tf.GradientTape() as tape:
            tape.watch([x, v])
            rows = tfdist.allgather(x)
            loss = tf.reduce_sum(rows**2 * weights[: tf.shape(rows)[0]]) * (rank + 1)
            loss += tf.reduce_sum(tfdist.allreduce(v, prescale=0.5) ** 2) * (rank + 1)
            a, b = tfdist.grouped_allreduce([v, 2 * v], op=ReduceOp.SUM)
            loss += tf.reduce_sum(a * b) * (rank + 1)
            loss += tf.reduce_sum(tfdist.broadcast(v, 1) ** 3) * (rank + 1)
            scalar = tfdist.allgather(v[0])
            loss += tf.reduce_sum(scalar**2) * (rank + 1)
        return tape.gradient(loss, [x, v])

    gradients = (tf.function(run) if compiled else run)(x, v)
    return [x.numpy(), v.numpy(), *(g.numpy() for g in gradients)]


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_the_sum_of_all_ranks_losses(compiled):
    size = 3
    results = run_ranks(losses, size, compiled)
    factor = 1.0 + 2.0 + 3.0  # the sum of all ranks' losses
    weights = numbers(20, (100, 3), "float64")
    total = sum(v for _, v, _, _ in results)
    begin = 0
    for rank, (x, v, dx, dv) in enumerate(results):
        rows = weights[begin : begin + len(x)]
        np.testing.assert_allclose(dx, factor * 2 * x * rows, rtol=1e-13)
        begin += len(x)
        # allreduce with average and 0.5: y = total / (2 * size)
        expected = factor * 2 * (total / (2 * size)) / (2 * size)
        # grouped: a * b = 2 total^2
        expected = expected + factor * 4 * total
        if rank == 1:
            expected = expected + factor * 3 * v**2
        expected[0] += factor * 2 * v[0]
        np.testing.assert_allclose(dv, expected, rtol=1e-13)
