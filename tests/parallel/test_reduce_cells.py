"""Every cell of the table dtype x ReduceOp on several ranks, against NumPy.

Integers are drawn from their whole range, extremes included; floating-point numbers
are small and whole, so that every order of additions gives the same bits.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.core import native

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e5m2", "float8_e4m3fn"]
ARITHMETIC = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT]
EXTREMES = [ReduceOp.MIN, ReduceOp.MAX]
LOGICAL = [ReduceOp.LOGICAL_AND, ReduceOp.LOGICAL_OR, ReduceOp.LOGICAL_XOR]
TABLE = {
    **dict.fromkeys(INTEGERS, ARITHMETIC + EXTREMES + LOGICAL),
    **dict.fromkeys(FLOATS, ARITHMETIC + EXTREMES),
    **dict.fromkeys(COMPLEX, ARITHMETIC),
    "bool": EXTREMES + LOGICAL,
    **dict.fromkeys(FLOAT8, []),
}
CELLS = [(dtype, op) for dtype, takes in TABLE.items() for op in takes]
ELEMENTWISE = [op for op in ReduceOp if op is not ReduceOp.ADASUM]  # test_adasum.py
REFUSED = [
    (dtype, op)
    for dtype, takes in TABLE.items()
    for op in ELEMENTWISE
    if op not in takes
]
LENGTHS = (1, 1003)


def numbers(rank, length, dtype):
    rng = np.random.default_rng([rank, length])
    if dtype == "bool":
        return rng.random(length) < 0.7
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        ends = [limits.min, limits.min + 1, 0, 0, 1, limits.max - 1, limits.max]
        anything = rng.integers(limits.min, limits.max, length, dtype, endpoint=True)
        some_end = np.array(ends, dtype)[rng.integers(0, len(ends), length)]
        return np.where(rng.random(length) < 0.5, anything, some_end)
    values = rng.integers(-9, 10, length).astype(np.float64)
    if dtype in COMPLEX:
        values = values + 1j * rng.integers(-9, 10, length)
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def expected(op, inputs):
    """What NumPy makes of the ranks' inputs, in the dtype of the inputs."""
    dtype, size = inputs[0].dtype, len(inputs)
    wide = np.float32 if dtype.name in ("float16", "bfloat16") else dtype
    stacked = np.stack(inputs).astype(wide)
    if op in LOGICAL:
        names = ("logical_and", "logical_or", "logical_xor")
        function = getattr(np, names[LOGICAL.index(op)])
        return function.reduce(stacked, axis=0).astype(dtype)
    if op in EXTREMES:
        function = np.minimum if op is ReduceOp.MIN else np.maximum
        return function.reduce(stacked, axis=0).astype(dtype)
    if op is ReduceOp.PRODUCT:
        return np.multiply.reduce(stacked, axis=0, dtype=wide).astype(dtype)
    total = np.add.reduce(stacked, axis=0, dtype=wide)
    if op is ReduceOp.AVERAGE and dtype.kind in "iu":
        total = np.array(
            [abs(t) // size * (-1 if t < 0 else 1) for t in total.tolist()]
        )
    elif op is ReduceOp.AVERAGE and dtype.kind == "c":
        real = total.real.dtype.type(size)
        total = total.real / real + 1j * (total.imag / real)
    elif op is ReduceOp.AVERAGE:
        total = total / total.dtype.type(size)
    return total.astype(dtype)


def all_cells(traced):
    """The results of all cells, in the order of CELLS.

    In a function only the long ones: half as many operations to trace.
    """
    inputs = [
        (tf.constant(numbers(tfdist.rank(), length, dtype)), op)
        for dtype, op in CELLS
        for length in LENGTHS[traced:]
    ]

    def reduce(tensors):
        return [
            tfdist.allreduce(x, op=op)
            for x, (_, op) in zip(tensors, inputs, strict=True)
        ]

    run = tf.function(reduce, autograph=False) if traced else reduce
    return [y.numpy() for y in run([x for x, _ in inputs])]


@pytest.mark.parametrize(
    "size, algorithm, traced",
    [(2, "auto", True), (3, "auto", False), (3, "pairwise", False)],
)
def test_every_cell_gives_what_numpy_gives(size, algorithm, traced):
    env = {"TFDIST_ALLREDUCE_ALGORITHM": algorithm}
    by_rank = run_ranks(all_cells, size, traced, env=env)
    index = 0
    for dtype, op in CELLS:
        for length in LENGTHS[traced:]:
            inputs = [numbers(r, length, dtype) for r in range(size)]
            want = expected(op, inputs)
            cell = f"{dtype} {op.name} of {length}"
            for own in by_rank:
                got = own[index]
                assert got.dtype == want.dtype, cell
                assert got.tobytes() == by_rank[0][index].tobytes(), cell
                if dtype in COMPLEX:  # the sign of a zero depends on the order
                    np.testing.assert_array_equal(got, want, cell)
                else:
                    assert got.tobytes() == want.tobytes(), cell
            index += 1
    assert index == len(by_rank[0]) == (2 - traced) * (8 * 8 + 4 * 5 + 2 * 3 + 5)


def nan_results():
    rank = tfdist.rank()
    results = []
    for dtype in FLOATS:
        x = np.arange(37, dtype=np.float64)
        x[rank::5] = np.nan
        x = x.astype(tf.as_dtype(dtype).as_numpy_dtype)
        results += [tfdist.allreduce(x, op=op).numpy() for op in TABLE[dtype]]
    return results


def test_a_nan_of_any_rank_is_in_the_result():
    want = np.isin(np.arange(37) % 5, [0, 1, 2])
    for own in run_ranks(nan_results, 3):
        assert len(own) == 4 * 5
        for result in own:
            np.testing.assert_array_equal(np.isnan(result.astype(np.float64)), want)


def moved_float8():
    rank = tfdist.rank()
    results = []
    for dtype in FLOAT8:
        x = tf.constant(numbers(rank, 5 + rank, dtype))
        results.append(tfdist.allgather(x).numpy())
        x = tf.constant(numbers(rank, 7, dtype))
        results.append(tfdist.broadcast(x, 1).numpy())
    return results


def test_float8_is_gathered_and_broadcast_bit_for_bit():
    want = []
    for dtype in FLOAT8:
        want.append(b"".join(numbers(r, 5 + r, dtype).tobytes() for r in range(3)))
        want.append(numbers(1, 7, dtype).tobytes())
    for own in run_ranks(moved_float8, 3):
        assert [y.tobytes() for y in own] == want
        assert [y.dtype.name for y in own] == [FLOAT8[0]] * 2 + [FLOAT8[1]] * 2


def refusals():
    """What Python says to each refused cell, and what the core itself says."""
    said = []
    for dtype, op in REFUSED:
        x = tf.cast(tf.constant([1.0, 2.0]), dtype)
        try:
            tfdist.allreduce(x, op=op)
        except TypeError as error:
            said.append([str(error), ""])
        if dtype in FLOAT8:  # the operation has no such kernel
            continue
        try:
            emit.allreduce([x], "past the check", op, "1.0", "1.0", None)
        except tf.errors.InvalidArgumentError as error:
            said[-1][1] = error.message
    after = tfdist.allreduce(1.0, op=ReduceOp.SUM)  # the world goes on
    return [said, float(after)]


def test_python_and_the_core_refuse_the_same_cells_in_the_same_words():
    for said, after in run_ranks(refusals, 2):
        assert after == 2.0
        assert len(said) == len(REFUSED)
        for (dtype, op), (python, core) in zip(REFUSED, said, strict=True):
            prefix = "tfdist.allreduce: "
            assert python.startswith(prefix + "Expected "), (dtype, op)
            assert dtype in python
            assert (
                "tf.cast(" in python or "logical_and" in python or "tf.abs(" in python
            )
            if dtype in FLOAT8:
                assert "tf.bfloat16" in python
            else:
                assert f"got {op.name.lower()}" in python
                assert python.removeprefix(prefix) in core


def test_python_and_the_core_have_the_same_operations():
    for op in ReduceOp:
        refusal = native.reduction_refusal(
            tf.as_dtype("float8_e5m2").as_datatype_enum, op
        )
        assert refusal is not None and refusal.startswith("Expected a dtype")
    with pytest.raises(native.CoreError, match="op is not valid"):
        native.check(native.library().tfdist_check_reducible(1, len(ReduceOp)))
