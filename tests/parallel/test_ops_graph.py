"""In a tf.function: nothing is folded, merged, pruned or chained, and order is free.

Each test is a trap that TensorFlow lays for operations with a partner in another
process. The core's records tell which operations really ran.
"""

import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp, grouped_broadcast
from tfdist.core import native


def ran(function, *args):
    """Names of the operations that `function` ran, and what it returned."""
    native.take_records()
    result = function(*args)
    return [row["name"] for row in native.take_records()], result


def call_with_constant_input():
    @tf.function
    def f():
        return tfdist.allreduce(tf.constant([1.0, 2.0]), op=ReduceOp.SUM)

    f()
    names, results = ran(lambda: [f().numpy().tolist() for _ in range(5)])
    return len(names), results


def test_a_constant_input_is_not_folded():
    for count, results in run_ranks(call_with_constant_input, 2):
        assert count == 5
        assert results == [[2.0, 4.0]] * 5


def call_with_identical_operations():
    @tf.function
    def f(x):
        return [tfdist.allreduce(x, name="same") for _ in range(10)]

    @tf.function
    def gathers(x):
        return [tfdist.allgather(x) for _ in range(10)]

    @tf.function
    def broadcasts(x):
        return [tfdist.broadcast(x) for _ in range(10)]

    x = tf.constant([1.0])
    return [len(ran(g, x)[0]) for g in (f, gathers, broadcasts)]


def test_identical_operations_are_not_merged():
    assert run_ranks(call_with_identical_operations, 2) == [[10, 10, 10]] * 2


def call_with_unused_outputs():
    @tf.function
    def f(x):
        tfdist.allreduce(x)
        tfdist.allgather(x)
        tfdist.broadcast(x)
        tfdist.barrier()
        return x + 1

    names, _ = ran(lambda: [f(tf.constant([1.0])) for _ in range(5)])
    return len(names)


def test_an_unused_output_does_not_prune_the_operation():
    assert run_ranks(call_with_unused_outputs, 2) == [20, 20]


def trace_in_own_order():
    """Every rank traces, and so lists, eight reductions in another order."""
    rank = tfdist.rank()
    order = np.random.default_rng(rank).permutation(8)

    @tf.function
    def f(xs):
        ys = {i: tfdist.allreduce(xs[i], op=ReduceOp.SUM, name=f"x{i}") for i in order}
        return [ys[i] for i in range(8)]

    xs = [tf.fill([100 + i], float(i + rank)) for i in range(8)]
    values = []
    for _ in range(20):
        values = [y.numpy() for y in f(xs)]
    return values


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_trace_in_different_orders_do_not_deadlock(size):
    for values in run_ranks(trace_in_own_order, size):
        for i, value in enumerate(values):
            expected = size * i + sum(range(size))
            np.testing.assert_array_equal(value, np.full(100 + i, expected, "f4"))


def trace_crosswise():
    """Rank 0 traces a then b, rank 1 b then a; b depends on nothing."""
    names = ["a", "b"] if tfdist.rank() == 0 else ["b", "a"]

    @tf.function
    def g(x):
        calls = {
            "a": lambda: tfdist.allgather(x, name="a"),
            "b": lambda: tfdist.broadcast(x, name="b"),
        }
        return {name: calls[name]() for name in names}

    out = g(tf.constant([float(tfdist.rank())]))
    return out["a"].numpy().tolist(), out["b"].numpy().tolist()


def test_allgather_and_broadcast_are_unordered_too():
    assert run_ranks(trace_crosswise, 2) == [[[0.0, 1.0], [0.0]]] * 2


def late(value, on):
    """The same number, later on one rank."""

    def wait(number):
        if tfdist.rank() == on:
            time.sleep(0.3)
        return number

    return tf.ensure_shape(tf.numpy_function(wait, [value], tf.int64, False), [])


def two_lists_of_one_name():
    """The last batches of both lists are ready in another order on each rank."""
    one = tf.constant(1.0)

    @tf.function
    def sums(s, t):
        s, t = late(s, 1), late(t, 0)
        first = tfdist.grouped_allreduce([one, s], op=ReduceOp.SUM, name="g")
        second = tfdist.grouped_allreduce([t, one], op=ReduceOp.SUM, name="g")
        return first[1], second[0]

    @tf.function
    def values(s, t):
        s, t = late(s, 1), late(t, 0)
        first = grouped_broadcast([one, s], name="g")
        second = grouped_broadcast([t, one], name="g")
        return first[1], second[0]

    numbers = tf.constant(1, tf.int64), tf.constant(100, tf.int64)
    return [[int(x) for x in f(*numbers)] for f in (sums, values)]


def test_batches_of_two_lists_with_one_name_are_not_mixed_up():
    assert run_ranks(two_lists_of_one_name, 2) == [[[2, 200], [1, 100]]] * 2


def control_inputs_of_operations():
    @tf.function
    def f(x):
        for _ in range(4):
            tfdist.allreduce(x)
        tfdist.barrier()
        return tfdist.allgather(x), tfdist.broadcast(x)

    graph = f.get_concrete_function(tf.constant([1.0])).graph
    chained = []
    for op in graph.get_operations():
        if op.type.startswith("Tfdist"):
            before = [c.type for c in op.control_inputs if c.type.startswith("Tfdist")]
            chained.append([op.type, before])
    return chained


def test_operations_in_one_function_are_not_chained():
    (chained,) = run_ranks(control_inputs_of_operations, 1)
    assert len(chained) == 7
    assert all(before == [] for _, before in chained)


def pending_together():
    """Rank 1 comes late: by then rank 0 has submitted all its operations at once."""

    @tf.function
    def f(xs):
        return [tfdist.allreduce(x, name=f"t{i}") for i, x in enumerate(xs)]

    xs = [tf.ones([10])] * 6
    f(xs)
    tfdist.barrier()
    native.take_records()
    if tfdist.rank() == 1:
        time.sleep(0.3)
    f(xs)
    rows = [row for row in native.take_records() if row["name"].startswith("t")]
    first_done = min(row["done_us"] for row in rows)
    return sum(row["submitted_us"] < first_done for row in rows)


def test_operations_in_one_function_are_in_flight_together():
    assert run_ranks(pending_together, 2)[0] == 6


def loop(parallel_iterations):
    rank = tfdist.rank()

    @tf.function
    def carried(x):
        for _ in tf.range(6):
            x = tfdist.allreduce(x, op=ReduceOp.SUM) - 1.0
        return x

    @tf.function
    def independent(xs):
        ys = tf.TensorArray(tf.float32, 30)

        def body(i, ys):
            # No iteration needs another one, and the slow ones are others on
            # every rank. All iterations have one name: they must stay in order.
            slow = tf.where((i + rank) % 3 == 0, 300, 1)
            m = tf.ones([slow, slow])
            zero = tf.cast(tf.reduce_sum(tf.linalg.matmul(m, m)) < 0, tf.float32)
            y = tfdist.allreduce(xs[i] + zero, op=ReduceOp.SUM)
            return i + 1, ys.write(i, y)

        _, ys = tf.while_loop(
            lambda i, _: i < 30,
            body,
            (0, ys),
            parallel_iterations=parallel_iterations,
        )
        return ys.stack()

    xs = tf.range(30, dtype=tf.float32) * (rank + 1)
    for _ in range(5):
        values = independent(xs).numpy()
    return float(carried(tf.constant(1.0))), values


@pytest.mark.parametrize(
    "parallel_iterations",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 30)), 10],
)
def test_in_a_while_loop_iterations_are_not_mixed_up(parallel_iterations):
    size = 3
    carried = 1.0
    for _ in range(6):
        carried = carried * size - 1.0
    for value, values in run_ranks(loop, size, parallel_iterations):
        assert value == carried
        np.testing.assert_array_equal(values, np.arange(30, dtype="f4") * 6)


def nested_and_branched():
    rank = tfdist.rank()

    @tf.function
    def inner(x):
        return tfdist.allreduce(x, op=ReduceOp.SUM)

    @tf.function
    def outer(x, flag):
        y = inner(x) + inner(2 * x)
        if flag:
            y += tfdist.allreduce(x, op=ReduceOp.MAX)
        else:
            y -= tfdist.allreduce(x, op=ReduceOp.MIN)
        return y

    x = tf.constant(float(rank + 1))
    return [float(outer(x, tf.constant(flag))) for flag in (True, False)]


def test_in_nested_functions_and_branches():
    # 1 + 2 + 3 = 6; 6 + 12 + max 3, 6 + 12 - min 1
    assert run_ranks(nested_and_branched, 3) == [[21.0, 17.0]] * 3


def retrace():
    @tf.function
    def f(x):
        return tfdist.allreduce(x, op=ReduceOp.SUM)

    # Rank 1 has traced once more than rank 0.
    if tfdist.rank() == 1:
        f.get_concrete_function(tf.zeros([7]))
    return f(tf.ones([3])).numpy().tolist()


def test_ranks_may_have_traced_differently_often():
    assert run_ranks(retrace, 2) == [[2.0] * 3] * 2


def seconds_around_a_barrier():
    @tf.function
    def f():
        before = tf.py_function(time.monotonic, [], tf.float64)
        tfdist.barrier()
        return before, tf.py_function(time.monotonic, [], tf.float64)

    f()
    if tfdist.rank() == 1:
        time.sleep(0.3)
    before, after = f()
    return float(after - before)


def test_a_barrier_keeps_its_place_among_the_effects():
    assert run_ranks(seconds_around_a_barrier, 2)[0] > 0.2
