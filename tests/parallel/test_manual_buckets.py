"""Horovod's groups: which operations there are, and that the result keeps its bits."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
import tfdist.horovod.tensorflow as hvd
from tfdist.core import native

SIZES = [700, 3, 300, 1, 40]


def variables():
    return [
        tf.Variable(tf.zeros(n, tf.float64 if n == 1 else tf.float32), name=f"v{n}")
        for n in SIZES
    ]


def reduced(groups, in_graph, compression=None):
    """The gradients, and the elements of each operation."""
    v = variables()
    if isinstance(groups, list):
        groups = [[v[i] for i in group] for group in groups]
    rng = np.random.default_rng(tfdist.rank())
    factors = [tf.constant(rng.normal(size=x.shape), x.dtype) for x in v]

    def step():
        with tf.GradientTape() as tape:
            parts = [
                tf.cast(tf.reduce_sum(x * f), tf.float64)
                for x, f in zip(v, factors, strict=True)
            ]
            loss = tf.add_n([parts[i] for i in (0, 1, 2, 3, 4)])
        tape = hvd.DistributedGradientTape(tape, groups=groups, compression=compression)
        return tape.gradient(loss, v)

    native.take_records()
    found = [g.numpy() for g in (tf.function(step) if in_graph else step)()]
    rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
    return [b"".join(g.tobytes() for g in found), sorted(row["bytes"] for row in rows)]


@pytest.mark.parametrize(
    ("groups", "sent"),
    [
        pytest.param(None, [8, 4 * 1043], marks=pytest.mark.slow),
        pytest.param(1, [8, 4 * 1043], marks=pytest.mark.slow),
        pytest.param(
            2, [8, 4 * 343, 4 * 700], marks=pytest.mark.slow
        ),  # one has two dtypes
        pytest.param(9, [4 * 3, 4 * 40, 4 * 300, 4 * 700, 8], marks=pytest.mark.slow),
        ([[0, 4], [2]], [8, 4 * 3, 4 * 300, 4 * 740]),
        pytest.param([[3, 1]], [8, 4 * 3, 4 * 1040], marks=pytest.mark.slow),
    ],
)
def test_the_buckets_are_those_and_the_bits_the_same(groups, sent):
    for in_graph in (False, True):
        plain = run_ranks(reduced, 2, None, in_graph)
        found = run_ranks(reduced, 2, groups, in_graph)
        assert [bits for bits, _ in found] == [bits for bits, _ in plain]
        assert [operations for _, operations in found] == [sorted(sent)] * 2


@pytest.mark.slow
def test_behind_the_gate_and_with_compression():
    env = {"TFDIST_ATOMIC_STEPS": "1"}
    plain = run_ranks(reduced, 2, None, False, "bf16")
    found = run_ranks(reduced, 2, [[0, 4], [2]], False, "bf16", env=env)
    assert [bits for bits, _ in found] == [bits for bits, _ in plain]
    # The float64 gradient is a bf16 one on the way: of one dtype with the others.
    assert [operations for _, operations in found] == [[2 * 4, 2 * 300, 2 * 740]] * 2


def disagreeing(kind):
    v = variables()
    other = {
        "number": [2, 3],
        "lists": [[[v[0], v[1]]], [[v[0]], [v[1]]]],
    }[kind][tfdist.rank()]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v[0]) + tf.reduce_sum(v[1])
    tape = hvd.DistributedGradientTape(tape, groups=other)
    return outcome(lambda: tape.gradient(loss, v))


@pytest.mark.parametrize("kind", ["number", "lists"])
def test_ranks_with_other_groups_are_told_at_once(kind):
    for found in run_ranks(disagreeing, 2, kind):
        assert found["class"] == "MismatchError"
        assert " groups=" in found["message"]
