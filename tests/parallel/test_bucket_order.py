"""Buckets along the traced graph (TFDIST_BUCKET_ORDER=traced): equal bits on ranks."""

import logging
import re
import statistics
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

OBSERVED = {"TFDIST_BUCKET_ORDER": "traced"}
# Two gradients fill a bucket.
SMALL = {"TFDIST_FIRST_BUCKET_BYTES": "6000", "TFDIST_BUCKET_BYTES": "6000"}
STEPS = 12
WIDTHS = [32, 33, 34, 35, 36, 37, 38]  # so that each weight has a size of its own
# Listed in pairs, as the blocks of a U-Net: the outermost pair is used first and last.
USED = [0, 2, 4, 5, 3, 1]


def weights():
    """Six matrices; that at place USED[k] of the list is used k-th."""
    rng = np.random.default_rng(7)
    made = {}
    for k, place in enumerate(USED):
        start = rng.normal(size=(WIDTHS[k], WIDTHS[k + 1])) / 6
        made[place] = tf.Variable(start.astype("float32"), name=f"w{place}")
    return [made[place] for place in sorted(made)]


def loss_of(v, x):
    for place in USED:
        x = tf.tanh(x @ v[place])
    return tf.reduce_mean(tf.square(x))


def trained(kind):
    """The weights after some steps; for each bucket its bytes; how often in turn."""
    v = weights()
    rng = np.random.default_rng(tfdist.rank())
    batches = [
        tf.constant(rng.normal(size=(rows, WIDTHS[0])), tf.float32)
        for rows in [64] * STEPS + [32]  # the last one is traced again
    ]
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.05),
        compression="bf16" if kind == "compressed" else None,
    )

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(v, x)
        grads = tape.gradient(loss, v)
        weight = 2 + tfdist.rank() if kind == "weighted" else None
        optimizer.apply(grads, v, weight=weight)

    step = step if kind == "eager" else tf.function(step)
    native.take_records()
    for x in batches:
        step(x)
    rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
    sizes = {int(r["name"].split(".")[2].split("#")[0]): r["bytes"] for r in rows}
    return {
        "bits": b"".join(w.numpy().tobytes() for w in v),
        "bytes": [sizes[number] for number in sorted(sizes)],
    }


def pairs_of(order, item_bytes=4):
    """Bytes of buckets that hold two gradients each, in this order of use."""
    size = [item_bytes * WIDTHS[k] * WIDTHS[k + 1] for k in range(len(USED))]
    return [size[a] + size[b] for a, b in order]


# Places in the order of use; the backward pass comes from 5 down to 0.
BY_READINESS = [(5, 4), (3, 2), (1, 0)]
BY_LIST = [(3, 2), (4, 1), (5, 0)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("plain", 2),
        pytest.param("plain", 3, marks=pytest.mark.slow),
        pytest.param("weighted", 2, marks=pytest.mark.slow),
        pytest.param("compressed", 2, marks=pytest.mark.slow),
        pytest.param("gated", 2, marks=pytest.mark.slow),
    ],
)
def test_buckets_follow_the_backward_pass_and_the_bits_stay(kind, ranks):
    env = dict(SMALL)
    if kind == "gated":
        env["TFDIST_ATOMIC_STEPS"] = "1"
    if kind == "compressed":
        env = {name: "3000" for name in SMALL}
    listed = run_ranks(trained, ranks, kind, env=env)
    observed = run_ranks(trained, ranks, kind, env={**env, **OBSERVED})
    item_bytes = 2 if kind == "compressed" else 4
    for found in listed:
        assert found["bytes"] == pairs_of(BY_LIST, item_bytes)
    for found in observed:
        assert found["bytes"] == pairs_of(BY_READINESS, item_bytes)
    assert {found["bits"] for found in [*listed, *observed]} == {listed[0]["bits"]}


@pytest.mark.slow
def test_eager_calls_have_all_gradients_at_once_and_keep_the_list():
    env = {**SMALL, **OBSERVED}
    for found in run_ranks(trained, 2, "eager", env=env):
        assert found["bytes"] == pairs_of(BY_LIST)


def apart():
    """Ranks that trace other graphs: rank 1 uses the weights the other way round."""
    v = [tf.Variable(tf.fill([32, 32], float(i + 1)), name=f"s{i}") for i in range(4)]
    used = v if tfdist.rank() == 0 else v[::-1]

    @tf.function
    def step(x):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(x)
            for i, w in enumerate(used):
                if tfdist.rank() == 0 or i:  # rank 1 has no gradient of the last one
                    loss = tf.sin(loss) * tf.reduce_sum(w)
        return tape.gradient(loss, v)

    native.take_records()
    for _ in range(3):
        found = step(tf.ones([3]))
    rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
    numbers = [r["name"].split("#")[0].split(".")[-1] for r in rows]
    return sorted(numbers), [float(g[0, 0]) for g in found]


def test_ranks_that_see_other_orders_take_that_of_the_lowest():
    env = {"TFDIST_FIRST_BUCKET_BYTES": "4096", "TFDIST_BUCKET_BYTES": "8192"}
    listed = run_ranks(apart, 2, env=env)
    observed = run_ranks(apart, 2, env={**env, **OBSERVED})
    assert observed == listed
    assert observed[0] == observed[1]
    assert observed[0][0] == ["0"] * 3 + ["1"] * 3 + ["2"] * 3


def joined():
    """Rank 0 has joined while the others trace and step; then all step."""
    v = weights()

    @tf.function
    def step(x):
        with tfdist.DistributedGradientTape() as tape:
            loss = loss_of(v, x)
        return tape.gradient(loss, v)

    x = tf.ones([4, WIDTHS[0]])
    if tfdist.rank():
        step(x)
    tfdist.join()
    grads = step(x)
    return b"".join(g.numpy().tobytes() for g in grads)


@pytest.mark.slow
def test_ranks_without_data_take_part_in_the_plan():
    env = {**SMALL, **OBSERVED}
    found = run_ranks(joined, 3, env=env)
    assert len(set(found)) == 1
    assert found == run_ranks(joined, 3, env=SMALL)


def told(in_pairs):
    """What is logged about the order of a model that is listed in pairs, or not."""
    n = 8
    v = [tf.Variable(tf.zeros([512, 512]), name=f"p{i}") for i in range(n)]
    pairs = [*range(0, n, 2), *reversed(range(1, n, 2))]
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(
        f"{record.levelname} {record.getMessage()}"
    )
    logger = logging.getLogger("tfdist")
    logger.addHandler(handler)

    @tf.function
    def step(x):
        with tfdist.DistributedGradientTape() as tape:
            for place in pairs if in_pairs else range(n):
                x = tf.tanh(x @ v[place])
            loss = tf.reduce_mean(x)
        return tape.gradient(loss, v)

    try:
        step(tf.ones([2, 512]))
        step(tf.ones([3, 512]))  # traced again
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "of gradients" in line]


def test_rank_zero_says_what_the_order_of_the_traced_function_would_gain():
    env = {"TFDIST_BUCKET_BYTES": str(2 << 20)}
    first, *others = run_ranks(told, 2, True, env=env)
    assert others == [[]]
    (line,) = first
    gain = re.search(r"gradients, (\S+) MiB are not yet .* would be (\S+) MiB", line)
    assert float(gain[1]) - float(gain[2]) >= 0.8
    assert line.startswith("WARNING gradients.")
    assert "Bucket 3 delays the most bytes, because p1:0 waits for p2:0" in line
    assert "TFDIST_BUCKET_ORDER=traced" in line


@pytest.mark.slow
def test_nothing_is_said_of_a_list_in_the_order_of_use():
    env = {"TFDIST_BUCKET_BYTES": str(2 << 20)}
    assert run_ranks(told, 2, False, env=env) == [[], []]


@pytest.mark.slow
def test_nothing_is_said_where_the_order_is_used():
    env = {"TFDIST_BUCKET_BYTES": str(2 << 20), **OBSERVED}
    assert run_ranks(told, 2, True, env=env) == [[], []]


def lead(steps):
    """How long before the last gradient a byte leaves, as a share of the step.

    The mean over the bytes, the median over the steps: 0 if all leave at the end. Eight
    layers of 1 MiB in pairs, as in `told`; a step takes some 50 ms.
    """
    n = 8
    v = [tf.Variable(tf.eye(512), name=f"p{i}") for i in range(n)]
    pairs = [*range(0, n, 2), *reversed(range(1, n, 2))]

    @tf.function
    def step(x):
        with tfdist.DistributedGradientTape() as tape:
            for place in pairs:
                x = tf.tanh(x @ v[place])
            loss = tf.reduce_mean(x)
        return tape.gradient(loss, v)

    x = tf.ones([1024, 512])
    for _ in range(3):
        step(x)
    found = []
    for _ in range(steps):
        native.take_records()
        begin_us = time.monotonic_ns() / 1000
        step(x)
        rows = [r for r in native.take_records() if r["name"].startswith("gradients.")]
        last_us = max(r["submitted_us"] for r in rows)
        total = sum(r["bytes"] for r in rows)
        early = sum((last_us - r["submitted_us"]) * r["bytes"] for r in rows)
        found.append(early / total / (last_us - begin_us))
    return statistics.median(found)


@pytest.mark.slow
def test_bytes_leave_earlier():
    # By the eight places in the backward pass, of 64: 16 along the list, 25 else.
    env = {"TFDIST_BUCKET_BYTES": str(2 << 20)}
    listed = run_ranks(lead, 2, 15, env=env)
    observed = run_ranks(lead, 2, 15, env={**env, **OBSERVED})
    assert min(observed) > max(listed) > 0
