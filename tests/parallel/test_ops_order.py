"""Many tensors, submitted by several threads in another order on every rank."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import Pool, run_ranks

import tfdist
from tfdist.collectives import ReduceOp

THREADS = 4
RANKS = {1: 2, 2: 4}  # by inter-op threads; for one thread they are started here


@pytest.fixture(scope="module")
def pools():
    """Workers by number of inter-op threads; two are those of all tests."""
    one = Pool({"TF_NUM_INTEROP_THREADS": "1"})
    yield {1: one.run, 2: run_ranks}
    one.close()


def values(rank, tensors):
    """Tensor i: its length, type and numbers differ from those of its neighbours."""
    dtypes = ("float32", "float16", "int64", "bfloat16")
    return [
        tf.cast(tf.fill([1 + (i * 37) % 3000], i % 50 + rank), dtypes[i % 4])
        for i in range(tensors)
    ]


def traced(xs, members):
    """A function with one operation for each member, in the order of `members`."""

    @tf.function
    def reduce():
        return [
            tfdist.allreduce(xs[i], op=ReduceOp.SUM, name=f"tensor{i}", timeout_s=60.0)
            for i in members
        ]

    reduce.get_concrete_function()
    return reduce


def wrong(members, ys):
    size = tfdist.size()
    offset = sum(range(size))
    return [
        i
        for i, y in zip(members, ys, strict=True)
        if not np.all(y.numpy() == (i % 50) * size + offset)
    ]


def submit_in_random_order(tensors, orders, repeats):
    rank = tfdist.rank()
    xs = values(rank, tensors)
    failures = []
    for number in range(orders):
        # Which thread has a tensor, and where in its list, is drawn on every rank.
        order = np.random.default_rng([number, rank]).permutation(tensors)
        parts = [[int(i) for i in part] for part in np.split(order, THREADS)]
        functions = [traced(xs, part) for part in parts]

        def work(function, part):
            try:
                for _ in range(repeats):
                    failures.extend(wrong(part, function()))
            except tf.errors.OpError as error:
                failures.append(str(error))

        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip(functions, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failures


@pytest.mark.parametrize("inter_op", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tensors_of_four_threads_in_random_order_get_their_own_sums(pools, inter_op):
    size = RANKS[inter_op]
    results = pools[inter_op](submit_in_random_order, size, 40, 1, 10, timeout_s=100.0)
    assert results == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("inter_op", [1, 2])
def test_a_hundred_runs_in_random_order(pools, inter_op):
    results = pools[inter_op](submit_in_random_order, 4, 200, 10, 10, timeout_s=600.0)
    assert results == [[]] * 4
