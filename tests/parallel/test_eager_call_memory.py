"""Values that differ in every eager call cost no memory for good.

TensorFlow keeps an eager kernel, 37 KiB, for every value of an attribute.
"""

import itertools
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

SUM = tfdist.ReduceOp.SUM


def resident_kib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4


def grow(kind, count):
    """KiB that `count` calls with values of their own have added."""
    x = tf.constant([1.0, 2.0])
    w = tf.Variable(x, name="w")

    def taped(name):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfdist.allreduce(x, op=SUM, name=name)
        return tape.gradient(y, x)

    def reduced(name):
        with tfdist.DistributedGradientTape(op=SUM, name=name) as tape:
            y = tf.reduce_sum(w)
        return tape.gradient(y, w)

    def in_new_set(_name):
        made = tfdist.add_process_set([0, 1])
        y = tfdist.allreduce(x, op=SUM, process_set=made)
        tfdist.remove_process_set(made)
        return y

    numbers = itertools.count(1)
    call = {
        "allreduce": lambda name: tfdist.allreduce(x, op=SUM, name=name),
        "allgather": lambda name: tfdist.allgather(x, name=name)[::2] * 2,
        "object": lambda name: tfdist.allgather_object([4.0, 4.0], name=name)[0],
        "taped": taped,
        "reduced": reduced,
        "process set": in_new_set,
        "prescale": lambda _: (
            tfdist.allreduce(x, op=SUM, prescale=1 / next(numbers)) * 0
        ),
        "timeout": lambda _: tfdist.allreduce(
            x, op=SUM, timeout_s=100 + next(numbers) / 8
        ),
    }[kind]
    for n in range(200):
        found = call(f"before {n}")
    before = resident_kib()
    for n in range(count):
        found = call(f"loss {n}")
    return [resident_kib() - before, tf.constant(found).numpy().tolist()]


KINDS = {  # value of the last call, KiB that a call may keep
    "allreduce": ([2.0, 4.0], 2.5),
    "allgather": ([2.0, 2.0], 2.5),
    "object": ([4.0, 4.0], 2.5),
    "taped": ([2.0, 2.0], 2.5),
    "process set": ([2.0, 4.0], 2.5),
    "prescale": ([0.0, 0.0], 2.5),
    "timeout": ([2.0, 4.0], 2.5),
    "reduced": ([2.0, 2.0], 12.0),  # what the ranks have agreed on is kept
}


def check(kind, count):
    value, limit_kib = KINDS[kind]
    for grown_kib, found in run_ranks(grow, 2, kind, count, timeout_s=300.0):
        assert found == value
        assert grown_kib <= limit_kib * count


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("allreduce", 1000),
        ("reduced", 300),
        pytest.param("taped", 1000, marks=pytest.mark.slow),
        pytest.param("reduced", 1000, marks=pytest.mark.slow),
    ],
)
def test_hundreds_of_names_cost_next_to_nothing(kind, count):
    check(kind, count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_values_cost_next_to_nothing(kind):
    check(kind, 20_000 if kind == "allreduce" else 4000)  # 50 MB of 20,000
