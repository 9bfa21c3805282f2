"""Mistakes in reduce, reduce_scatter, gather, scatter, alltoall: errors on all ranks.

Rank 1 is the odd one. Nobody waits for the deadline, and the ranks can go on.
"""

import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp

X = [[1.0, 2.0]] * 6
KINDS = ("reduce", "reduce_scatter", "gather", "scatter", "alltoall")
ROOTED = ("reduce", "gather", "scatter")
SPLIT = ("reduce_scatter", "scatter", "alltoall")


def call(kind, x, *, root=1, splits=None, op=ReduceOp.SUM, postscale=1.0):
    if kind == "reduce":
        return tfdist.reduce(x, root, op=op, postscale=postscale, name="x")
    if kind == "reduce_scatter":
        return tfdist.reduce_scatter(x, splits, op=op, postscale=postscale, name="x")
    if kind == "gather":
        return tfdist.gather(x, root, name="x")
    if kind == "scatter":
        return tfdist.scatter(x, root, splits, name="x")
    return tfdist.alltoall(x, splits, name="x")


def call_with(kind, what, is_odd):
    x = tf.constant(X)
    if what == "kind" and is_odd:
        return lambda: tfdist.allgather(x, name="x")
    if what == "dtype" and is_odd:
        x = tf.cast(x, tf.float64)
    if what == "row" and is_odd:
        x = tf.ones([6, 3])
    options = {}
    if what == "root":
        options["root"] = 2 if is_odd else 0
    if what == "no such root":
        options["root"] = 9
    if what == "op" and is_odd:
        options["op"] = ReduceOp.MAX
    if what == "factor" and is_odd:
        options["postscale"] = 0.5
    if what == "splits" and is_odd:
        options["splits"] = [1, 1, 4]
    if what == "sum" and is_odd:
        options["splits"] = [1, 1, 1]
    if what == "negative" and is_odd:
        options["splits"] = [-1, 1, 6]
    if what == "count" and is_odd:
        options["splits"] = [3, 3]
    if what == "parts" and is_odd:
        x = tf.ones([5, 2])
    return lambda: call(kind, x, **options)


MISMATCHES = {
    "kind": ("allgather",),
    "dtype": ("float32", "float64"),
    "row": ("2", "3"),
    "root": ("ranks 0,2: 0", "rank 1: 2"),
    "op": ("sum", "max"),
    "factor": ("postscale 0.5",),
    "splits": ("[2,2,2]", "[1,1,4]"),
}
BAD = {
    "no such root": ("ranks 0,1,2", "[0, 3)", "got 9"),
    "sum": ("rank 1", "[1,1,1]", "sum to 3", "6 rows"),
    "negative": ("rank 1", "[-1,1,6]", "negative"),
    "count": ("rank 1", "[3,3]", "expected 3"),
    "parts": ("rank 1", "5 rows", "3 equal parts"),
}
CASES = [
    *((kind, what) for kind in KINDS for what in ("kind", "dtype", "row")),
    *((kind, what) for kind in ROOTED for what in ("root", "no such root")),
    *(
        (kind, what)
        for kind in ("reduce", "reduce_scatter")
        for what in ("op", "factor")
    ),
    *((kind, what) for kind in SPLIT for what in ("sum", "negative", "count")),
    ("reduce_scatter", "splits"),
    ("alltoall", "parts"),
]


def all_mistakes(compiled):
    results = []
    for kind, what in CASES:
        step = call_with(kind, what, tfdist.rank() == 1)
        if compiled:
            step = tf.function(step)
            step.get_concrete_function()  # tracing is not what is timed
        tfdist.barrier()
        results.append(outcome(step))
    after = tfdist.allreduce(tf.ones([2]), op=ReduceOp.SUM).numpy().tolist()
    return results, after


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_mistake_is_an_error_on_all_ranks_and_they_can_go_on(compiled):
    by_rank = run_ranks(all_mistakes, 3, compiled)
    for rank, (results, after) in enumerate(by_rank):
        assert after == [3.0, 3.0]
        for (kind, what), result in zip(CASES, results, strict=True):
            where = f"{kind}, {what}, rank {rank}: {result}"
            is_mismatch = what in MISMATCHES
            expected = "MismatchError" if is_mismatch else "InvalidArgumentError"
            assert result["class"] == expected, where
            # Far below the deadline of 60 s; the machine may be busy.
            assert result["seconds"] < 5.0, where
            assert '"x"' in result["message"], where
            for text in MISMATCHES[what] if is_mismatch else BAD[what]:
                assert text in result["message"], where


def empty_splits():
    step = tf.function(lambda s: tfdist.alltoall(tf.ones([4]), s, name="x"))
    splits = tf.ones([2, 1], tf.int64)
    return outcome(lambda: step(splits))


def test_splits_that_are_no_vector_are_refused_when_traced():
    for result in run_ranks(empty_splits, 2):
        assert result["class"] == "ValueError"
        assert "vector of integers" in result["message"]
