"""Operations that several threads of each rank call: right, or refused on all ranks.

Every thread computes what only the same thread of the other ranks can make right. The
threads start in another order on every rank.
"""

import random
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist import callbacks
from tfdist.collectives.consistency import in_step

SUM = tfdist.ReduceOp.SUM
RANKS = 2
THREADS = 8


def mine(thread, call):
    """The contribution of a thread of rank r; no other thread has the same sum."""
    return 100.0 * thread + call % 7 + tfdist.rank()


def summed(thread, call):
    return tfdist.size() * (100.0 * thread + call % 7) + sum(range(tfdist.size()))


# ---- calls: each gives a function of the number of the call, which says if it is right


def allreduce(thread, name):
    def call(n):
        y = tfdist.allreduce(tf.constant(mine(thread, n)), op=SUM, name=name)
        return float(y) == summed(thread, n)

    return call


def grouped_allreduce(thread, name):
    def call(n):
        xs = [tf.constant(mine(thread, n)), tf.constant([int(mine(thread, n))])]
        a, b = tfdist.grouped_allreduce(xs, op=SUM, name=name)
        return float(a) == summed(thread, n) == float(b[0])

    return call


def reduce(thread, name):
    def call(n):
        y = tfdist.reduce(tf.constant(mine(thread, n)), 1, op=SUM, name=name)
        return tfdist.rank() != 1 or float(y) == summed(thread, n)

    return call


def reduce_scatter(thread, name):
    def call(n):
        x = tf.fill([tfdist.size()], mine(thread, n))
        y = tfdist.reduce_scatter(x, op=SUM, name=name)
        return y.numpy().tolist() == [summed(thread, n)]

    return call


def allgather(thread, name):
    def call(n):
        y = tfdist.allgather(tf.constant(mine(thread, n)), name=name)
        return float(tf.reduce_sum(y)) == summed(thread, n)

    return call


def gather(thread, name):
    def call(n):
        y = tfdist.gather(tf.constant([mine(thread, n)]), 1, name=name)
        return tfdist.rank() != 1 or float(tf.reduce_sum(y)) == summed(thread, n)

    return call


def scatter(thread, name):
    def call(n):
        x = tf.range(tfdist.size(), dtype=tf.float32) + 100.0 * thread
        y = tfdist.scatter(x, 0, name=name)
        return y.numpy().tolist() == [100.0 * thread + tfdist.rank()]

    return call


def alltoall(thread, name):
    def call(n):
        y, _ = tfdist.alltoall(tf.fill([tfdist.size()], mine(thread, n)), name=name)
        return float(tf.reduce_sum(y)) == summed(thread, n)

    return call


def broadcast(thread, name):
    def call(n):
        y = tfdist.broadcast(tf.constant(mine(thread, n)), 0, name=name)
        return float(y) == mine(thread, n) - tfdist.rank()

    return call


def send_and_recv(thread, name):
    def call(n):
        if tfdist.rank() == 0:
            tfdist.send(tf.constant(mine(thread, n)), 1, name=name)
            return True
        if tfdist.rank() == 1:
            y = tfdist.recv([], tf.float32, 0, name=name)
            return float(y) == mine(thread, n) - 1
        return True

    return call


def broadcast_object(thread, name):
    def call(n):
        found = tfdist.broadcast_object([thread, n], 1, name=name)
        return found == [thread, n]

    return call


def allgather_object(thread, name):
    def call(n):
        found = tfdist.allgather_object([thread, n], name=name)
        return found == [[thread, n]] * tfdist.size()

    return call


def in_a_function(thread, name):
    @tf.function(autograph=False)  # which several threads cannot use at once
    def step(x):
        return tfdist.allreduce(x, op=SUM, name=name)

    def call(n):
        return float(step(tf.constant(mine(thread, n)))) == summed(thread, n)

    return call


def eager_tape(thread, name):
    w = tf.Variable([0.0, 0.0], name="w")

    def call(n):
        with tfdist.DistributedGradientTape(op=SUM, name=name) as tape:
            loss = tf.reduce_sum(w) * mine(thread, n)
        return tape.gradient(loss, w).numpy().tolist() == [summed(thread, n)] * 2

    return call


def tape_in_a_function(thread, name):
    w = tf.Variable([0.0, 0.0], name="w")

    @tf.function(autograph=False)  # which several threads cannot use at once
    def step(x):
        with tfdist.DistributedGradientTape(op=SUM, name=name) as tape:
            loss = tf.reduce_sum(w) * x
        return tape.gradient(loss, w)

    def call(n):
        found = step(tf.constant(mine(thread, n)))
        return found.numpy().tolist() == [summed(thread, n)] * 2

    return call


def eager_optimizer(thread, name):
    w = tf.Variable([0.0, 0.0], name="w")
    own = keras.optimizers.SGD(1.0)
    optimizer = tfdist.DistributedOptimizer(own, op=SUM, name=name)

    def call(n):
        w.assign([0.0, 0.0])
        optimizer.apply([tf.fill([2], mine(thread, n))], [w])
        return w.numpy().tolist() == [-summed(thread, n)] * 2

    return call


def train_on_batch(thread, name):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, name="d", use_bias=False)], name="net"
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), name=name)
    # The gradient is the mean of x.
    model.compile(optimizer, lambda y_true, y_pred: keras.ops.mean(y_pred))

    def call(n):
        before = model.get_weights()[0][0, 0]
        model.train_on_batch(
            np.full((2, 1), mine(thread, n), "float32"), np.zeros((2, 1), "float32")
        )
        step = before - model.get_weights()[0][0, 0]
        return abs(step - summed(thread, n) / tfdist.size()) < 0.01

    return call


def barrier(thread, name):
    def call(n):
        tfdist.barrier(name=name)
        return True

    return call


def broadcast_variables(thread, _name):
    def call(n):
        v = tf.Variable(mine(thread, n), name="v")
        tfdist.broadcast_variables([v], 0)
        return float(v) == mine(thread, n) - tfdist.rank()

    return call


def fit(thread, name):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, name="d", use_bias=False)], name="net"
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), name=name)
    model.compile(optimizer, lambda y_true, y_pred: keras.ops.mean(y_pred))
    both = [callbacks.BroadcastInitialState(), callbacks.MetricAverage()]

    def call(n):
        before = model.get_weights()[0][0, 0]
        x = np.full((2, 1), mine(thread, n), "float32")
        model.fit(x, np.zeros((2, 1)), verbose=0, callbacks=both)
        step = before - model.get_weights()[0][0, 0]
        return abs(step - summed(thread, n) / tfdist.size()) < 0.01

    return call


def evaluate(thread, _name):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
    model.compile(loss="mae")

    def call(n):
        x = np.full((2, 1), mine(thread, n), "float32")
        loss = tfdist.evaluate(model, x, np.zeros((2, 1), "float32"), verbose=0)
        return abs(loss - summed(thread, n) / tfdist.size()) < 0.01

    return call


def predict(thread, _name):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])

    def call(n):
        x = np.full((2 * tfdist.size(), 1), 100.0 * thread + n, "float32")
        found = tfdist.predict(model, x, verbose=0)
        return np.array_equal(found, x)

    return call


def process_sets(thread, _name):
    def call(n):
        made = tfdist.add_process_set([thread % tfdist.size()])
        return made.ranks == (thread % tfdist.size(),)

    return call


_one_for_all = tf.function(lambda x: tfdist.allreduce(x, op=SUM, name="shared"))


def one_function_for_all(thread, _name):
    def call(n):
        found = _one_for_all(tf.constant(mine(thread, n)))
        return float(found) == summed(thread, n)

    return call


def run(calls, named, count, seed):
    """[calls that were wrong, calls that were right, classes of errors]"""
    kinds = [globals()[kind] for kind in calls]
    works = []
    if one_function_for_all in kinds:
        # Traced here: several threads cannot use AutoGraph at once. It is not called,
        # because the threads of another rank might fail before the call has ended.
        _one_for_all.get_concrete_function(tf.constant(0.0))
    for thread in range(THREADS):
        kind = kinds[thread % len(kinds)]
        works.append(kind(thread, f"{kind.__name__} {thread}" if named else None))
    order = list(range(THREADS))
    random.Random(100 * seed + tfdist.rank()).shuffle(order)
    wrong, right, errors = [], [], []

    def work(thread):
        try:
            for n in range(count):
                (right if works[thread](n) else wrong).append(thread)
        except tf.errors.OpError as error:
            found = tfdist.errors.from_tf(error)
            errors.append(type(found or error).__name__)
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=[thread]) for thread in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(wrong), len(right), sorted(set(errors))]


NAMED = [
    *("allreduce", "grouped_allreduce", "reduce", "reduce_scatter", "allgather"),
    *("gather", "scatter", "alltoall", "broadcast", "send_and_recv", "barrier"),
    *("broadcast_object", "allgather_object", "in_a_function", "eager_tape"),
    *("tape_in_a_function", "eager_optimizer", "train_on_batch"),
]
UNNAMED = [
    *NAMED,
    *("broadcast_variables", "fit", "evaluate", "predict", "process_sets"),
    "one_function_for_all",
]
REFUSALS = ["MismatchError", "RankFailedError", "ThreadError"]


def check_right_or_refused(kind, count, seed, size=RANKS):
    found = run_ranks(run, size, [kind], False, count, seed, timeout_s=300.0)
    if all(wrong == 0 and errors == [] for wrong, _, errors in found):
        assert [right for _, right, _ in found] == [THREADS * count] * size
        return
    for _, right, errors in found:
        assert right < THREADS * count
        assert errors and set(errors) <= set(REFUSALS), found


@pytest.mark.parametrize(
    "kind", ["allreduce", "allgather_object", "eager_optimizer", "one_function_for_all"]
)
def test_eight_threads_with_default_names_are_right_or_refused(kind):
    check_right_or_refused(kind, 20, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNNAMED)
def test_twenty_runs_of_eight_threads_are_right_or_refused(kind):
    pairs = kind == "send_and_recv"  # a third rank takes no part
    for seed in range(20):
        check_right_or_refused(kind, 200, seed, size=2 if pairs else 2 + seed % 2)


def test_threads_with_names_of_their_own_are_right():
    kinds = ["allreduce", "allgather_object", "eager_optimizer", "tape_in_a_function"]
    found = run_ranks(run, RANKS, kinds, True, 20, 1)
    assert found == [[0, THREADS * 20, []]] * RANKS


class SlowlyDeleted(in_step.ResourceVariable):
    """A variable during whose deletion other threads run."""

    def __del__(self):
        time.sleep(0.05)


def run_in_two_worlds():
    original, in_step.ResourceVariable = in_step.ResourceVariable, SlowlyDeleted
    try:
        first = run(["tape_in_a_function"], True, 2, seed=1)
        tfdist.shutdown()
        tfdist.init(timeout_s=30)
        return [first, run(["tape_in_a_function"], True, 2, seed=2)]
    finally:
        in_step.ResourceVariable = original


def test_threads_reduce_gradients_while_those_of_an_earlier_world_are_forgotten():
    found = run_ranks(run_in_two_worlds, RANKS)
    assert found == [[[0, THREADS * 2, []]] * 2] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMED)
def test_many_calls_of_threads_with_names_of_their_own_are_right(kind):
    for seed, size in enumerate([2, 3]):
        found = run_ranks(run, size, [kind], True, 200, seed, timeout_s=300.0)
        assert found == [[0, THREADS * 200, []]] * size
