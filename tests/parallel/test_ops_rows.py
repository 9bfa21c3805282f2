"""reduce, reduce_scatter, gather, scatter, alltoall on 2 to 4 ranks, bit by bit.

Inputs are small whole numbers, whose sums every type holds exactly.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.one_process import even_splits, outputs
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp

SLOW = pytest.mark.slow
REDUCED = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]
MOVED = [*REDUCED, "bool", "float8_e5m2", "float8_e4m3fn"]
THOROUGH = ["float32", "bfloat16", "bool", "float8_e5m2"]
REDUCING = ("reduce", "reduce_scatter")


def numbers(rank, shape, dtype):
    """Whole numbers from -4 to 4, different on every rank; none below 0 if unsigned."""
    rng = np.random.default_rng([rank, len(shape), sum(shape)])
    values = rng.integers(-4, 5, shape)
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    if dtype.startswith("u") or dtype == "bool":
        values = np.abs(values)
    return values.astype(numpy_dtype)


def uneven(rows, size):
    """Nothing for rank 0, one row for the last one, the rest for those between."""
    between = even_splits(rows - 1, size - 2) if size > 2 else []
    splits = [0, *between, 1]
    splits[-1] += rows - sum(splits)
    return splits


def cases(size):
    """Kind, shape by rank, splits, root."""
    last = size - 1
    everything = [
        ("reduce", [(7, 3)] * size, None, last),
        ("reduce", [()] * size, None, 0),
        ("reduce", [(3, 0)] * size, None, 0),
        ("reduce", [(5003,)] * size, None, 1),
        ("reduce_scatter", [(7, 3)] * size, None, 0),
        ("reduce_scatter", [(7, 3)] * size, uneven(7, size), 0),
        ("reduce_scatter", [(1,)] * size, None, 0),
        ("reduce_scatter", [()] * size, None, 0),
        ("reduce_scatter", [(0, 2)] * size, None, 0),
        ("reduce_scatter", [(5003,)] * size, uneven(5003, size), 0),
        ("gather", [(r, 3) for r in range(size)], None, last),
        ("gather", [(2 * (last - r),) for r in range(size)], None, 0),
        ("gather", [()] * size, None, 1),
        ("gather", [(0, 4)] * size, None, 0),
        ("gather", [(1000 * r + 7,) for r in range(size)], None, 0),
        ("scatter", [(7 if r == 0 else 0, 2) for r in range(size)], None, 0),
        ("scatter", [(7 if r == last else r, 2) for r in range(size)], None, last),
        ("scatter", [(7,)] * size, uneven(7, size), 0),
        ("scatter", [()] * size, None, 0),
        ("scatter", [(0, 3)] * size, None, 0),
        ("scatter", [(5003,)] * size, uneven(5003, size), 1),
        ("alltoall", [(size * r, 2) for r in range(size)], None, 0),
        ("alltoall", [(r + 5,) for r in range(size)], "by rank", 0),
        ("alltoall", [(0, 3)] * size, None, 0),
        ("alltoall", [(1700 * r + 31,) for r in range(size)], "by rank", 0),
    ]
    return [(k, s, by_rank(k, s, splits), root) for k, s, splits, root in everything]


def by_rank(kind, shapes, splits):
    """Splits of each rank; those of an alltoall differ."""
    size = len(shapes)
    if splits is None:
        return [None] * size
    if kind != "alltoall":
        return [splits] * size
    return [
        np.roll(uneven(shape[0], size), r).tolist() for r, shape in enumerate(shapes)
    ]


def call(kind, x, splits, root):
    if kind == "reduce":
        return [tfdist.reduce(x, root, op=ReduceOp.SUM)]
    if kind == "reduce_scatter":
        return [tfdist.reduce_scatter(x, splits, op=ReduceOp.SUM)]
    if kind == "gather":
        return [tfdist.gather(x, root)]
    if kind == "scatter":
        return [tfdist.scatter(x, root, splits)]
    return list(tfdist.alltoall(x, splits))


def selected(size, dtype):
    """All cases of some types, the first one of each kind of the others."""
    moves_only = dtype not in REDUCED
    chosen = [c for c in cases(size) if not (moves_only and c[0] in REDUCING)]
    if dtype in THOROUGH:
        return chosen
    kinds = [kind for kind, *_ in chosen]
    return [case for i, case in enumerate(chosen) if kinds.index(case[0]) == i]


def all_cases(dtypes, compiled):
    rank, size = tfdist.rank(), tfdist.size()
    results = []
    for dtype in dtypes:
        chosen = selected(size, dtype)

        def run(*xs, chosen=chosen):
            return [
                call(kind, x, splits[rank], root)
                for (kind, _, splits, root), x in zip(chosen, xs, strict=True)
            ]

        xs = [
            tf.constant(numbers(rank, shapes[rank], dtype))
            for _, shapes, _, _ in chosen
        ]
        for ys in (tf.function(run, autograph=False) if compiled else run)(*xs):
            results.append([[list(y.shape), y.numpy().tobytes()] for y in ys])
    return results


def in_one_process(kind, xs, splits, root):
    """The expected outputs, a list for each rank."""
    size = len(xs)
    if kind != "reduce":
        xs = [np.atleast_1d(x) for x in xs]
    if kind != "alltoall":
        ys = outputs(kind, xs, np.concatenate, splits=splits[root], root=root)
        return [[y.astype(xs[0].dtype)] for y in ys]
    given = None if splits[0] is None else splits
    rows = outputs(kind, xs, np.concatenate, splits=given)
    sent = given or [[len(x) // size] * size for x in xs]
    received = [np.array([s[r] for s in sent], np.int64) for r in range(size)]
    return [list(pair) for pair in zip(rows, received, strict=True)]


def check(by_rank, dtypes):
    size = len(by_rank)
    index = 0
    for dtype in dtypes:
        for kind, shapes, splits, root in selected(size, dtype):
            xs = [numbers(r, shape, dtype) for r, shape in enumerate(shapes)]
            for rank, expected in enumerate(in_one_process(kind, xs, splits, root)):
                got = by_rank[rank][index]
                where = (
                    f"{kind} of {dtype} {shapes}, {splits}, root {root}, rank {rank}"
                )
                assert len(got) == len(expected), where
                for (shape, data), want in zip(got, expected, strict=True):
                    assert shape == list(want.shape), where
                    have = np.frombuffer(data, want.dtype).reshape(shape)
                    # -0.0 and 0.0 are equal numbers with different bits.
                    np.testing.assert_array_equal(have, want, err_msg=where)
            index += 1
    assert all(len(results) == index for results in by_rank)


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)]
)
def test_every_type_and_shape_gives_what_numpy_gives(size):
    check(run_ranks(all_cases, size, MOVED, False), MOVED)


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=SLOW) for n in (3, 4))])
def test_the_same_in_a_function(size):
    check(run_ranks(all_cases, size, THOROUGH, True), THOROUGH)


def averages():
    x = tf.constant([3.0, 6.0, 9.0]) * (tfdist.rank() + 1)
    return [
        tfdist.reduce(x, 2).numpy(),
        tfdist.reduce(x, 2, op=ReduceOp.MAX).numpy(),
        tfdist.reduce_scatter(x).numpy(),
        tfdist.reduce_scatter(x, op=ReduceOp.MIN, splits=[1, 1, 1]).numpy(),
        tfdist.reduce_scatter(x, prescale=2.0, postscale=0.5).numpy(),
        x.numpy(),
    ]


def test_the_default_is_the_average_and_other_operations_and_factors_count():
    for rank, results in enumerate(run_ranks(averages, 3)):
        own = np.array([3.0, 6.0, 9.0]) * (rank + 1)
        average, maximum, part, least, scaled, x = results
        assert x.tolist() == own.tolist()
        is_root = rank == 2
        assert average.tolist() == ([6.0, 12.0, 18.0] if is_root else own.tolist())
        assert maximum.tolist() == ([9.0, 18.0, 27.0] if is_root else own.tolist())
        assert part.tolist() == scaled.tolist() == [[6.0], [12.0], [18.0]][rank]
        assert least.tolist() == [[3.0], [6.0], [9.0]][rank]


def splits_from_a_tensor():
    rank = tfdist.rank()

    @tf.function
    def send_all_to(target, x):
        return tfdist.alltoall(x, tf.one_hot(target, 2, dtype=tf.int32) * tf.size(x))

    x = tf.fill([rank + 1], rank)
    results = []
    for target in (0, 1):  # one trace, different splits
        rows, received = send_all_to(tf.constant(target), x)
        results.append([rows.numpy().tolist(), received.numpy().tolist()])
    return results


def test_splits_may_be_computed():
    first, second = run_ranks(splits_from_a_tensor, 2)
    everything = [[0, 1, 1], [1, 2]]
    assert first == [everything, [[], [0, 0]]]
    assert second == [[[], [0, 0]], everything]


def an_input_that_is_used_again():
    """The operations may not write into a tensor that something else reads."""

    @tf.function
    def f(x):
        y = x * 1.0
        return y, tfdist.reduce(y, 0, op=ReduceOp.SUM), tfdist.gather(y), y + 0.0

    before, reduced, _, after = f(tf.fill([1000], 1.0 + tfdist.rank()))
    return [float(tf.reduce_sum(t)) for t in (before, reduced, after)]


def test_an_input_that_is_used_again_keeps_its_value():
    first, second = run_ranks(an_input_that_is_used_again, 2)
    assert first == [1000.0, 3000.0, 1000.0]
    assert second == [2000.0] * 3


def parallel_loop():
    """Many of them in flight at once, in another order on every rank."""
    rank, size = tfdist.rank(), tfdist.size()

    @tf.function
    def f(xs):
        calls = {}
        for i in np.random.default_rng(rank).permutation(len(xs)):
            calls[i] = tfdist.alltoall(xs[i], name=f"t{i}")[0]
        return [calls[i] for i in range(len(xs))]

    xs = [tf.range(size, dtype=tf.float32) + 10.0 * rank + 100.0 * i for i in range(20)]
    return [y.numpy().tolist() for y in f(xs)]


def test_many_at_once_are_not_mixed_up():
    for rank, results in enumerate(run_ranks(parallel_loop, 3)):
        expected = [[rank + 10.0 * r + 100.0 * i for r in range(3)] for i in range(20)]
        assert results == expected
