"""Gradients whose order needs no message, and a graph that changes on one rank."""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist import errors
from tfdist.core import native

SLOW = pytest.mark.slow
STEPS = 12
QUIET_FROM = 3  # steps after which no message is sent any more
PREDICTED_FROM = 9  # the same, for a single allreduce


class Messages(keras.callbacks.Callback):
    """Notes the number of messages sent after every step."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_train_batch_end(self, batch, logs=None):
        self.counts.append(native.counters()["negotiation_messages"])


def fitted():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(1)]
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        loss="mse",
        jit_compile=False,
    )
    x = np.random.default_rng(tfdist.rank()).normal(size=(STEPS * 4, 8))
    messages = Messages()
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[messages])
    return [messages.counts, native.counters()]


def taped():
    v = [tf.Variable(tf.ones([n])) for n in (3, 70_000, 500_000)]

    @tf.function
    def step():
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * w) for w in v])
        for w, g in zip(v, tape.gradient(loss, v), strict=True):
            w.assign_sub(0.1 * g)

    counts = []
    for _ in range(STEPS):
        step()
        counts.append(native.counters()["negotiation_messages"])
    return [counts, native.counters()]


@pytest.mark.parametrize(
    ("training", "size"),
    [
        (fitted, 2),
        (taped, 3),
        pytest.param(fitted, 3, marks=SLOW),
        pytest.param(taped, 2, marks=SLOW),
    ],
)
def test_after_three_steps_no_message_is_sent_for_order(training, size):
    env = {"TFDIST_WEIGHT_CHECK": "off"}  # its messages are not about order
    for counts, counters in run_ranks(training, size, env=env):
        assert len(counts) == STEPS and counts[QUIET_FROM - 1] > 0
        assert counts[QUIET_FROM:] == [counts[QUIET_FROM - 1]] * (STEPS - QUIET_FROM)
        assert counters["predicted"] > 0
        assert counters["deviations"] == counters["probes"] == 0


def repeated(in_turn):
    """Functions with so many allreduces; eager ones, of which one differs at last."""
    size = tfdist.size()

    @tf.function
    def all_of(x):
        return [tfdist.allreduce(x, op=tfdist.ReduceOp.SUM) for _ in range(in_turn)]

    counts = []
    for i in range(STEPS):
        for found in all_of(tf.fill([3], float(i))):
            assert found.numpy().tolist() == [size * float(i)] * 3
        counts.append(native.counters()["negotiation_messages"])
    counters = native.counters()

    one = tf.ones([4])
    for _ in range(4):
        tfdist.allreduce(one, name="mine")
    with pytest.raises(tfdist.MismatchError, match=r"rank 1: \[5\]"):
        tfdist.allreduce(one if tfdist.rank() != 1 else tf.ones([5]), name="mine")
    after = tfdist.allreduce(one, name="mine").numpy().tolist()
    return [counts, counters, after]


@pytest.mark.parametrize("in_turn", [1, pytest.param(4, marks=SLOW), 5])
def test_few_allreduces_of_a_function_need_no_message(in_turn):
    later = STEPS - PREDICTED_FROM
    found = run_ranks(repeated, 2, in_turn)
    nobody_stood_still = all(counters["probes"] == 0 for _, counters, _ in found)
    for counts, counters, after in found:
        if in_turn <= 4:
            assert counters["predicted"] == in_turn * later
            if nobody_stood_still:  # else the ranks have asked each other
                assert counts[PREDICTED_FROM:] == [counts[PREDICTED_FROM - 1]] * later
        else:  # they go together instead
            assert len(set(counts)) > PREDICTED_FROM
            assert counters["predicted"] == 0
        assert after == [1.0] * 4  # what is called eagerly may differ, and go on


def changed(what):
    """Trains three steps, then rank 1 does otherwise."""
    v = [tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4000]))]

    def step(own):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * w) for w in own])
        return tape.gradient(loss, own)

    compiled = tf.function(lambda: step(v))
    for _ in range(3):
        compiled()
    begin = time.monotonic()
    try:
        if tfdist.rank() != 1:
            compiled()
        elif what == "variables":
            tf.function(lambda: step(v[:1]))()
        elif what == "order":
            tf.function(lambda: step(v[::-1]))()
        elif what == "operation":
            tf.function(lambda: other_operation(v))()
    except tf.errors.OpError as error:
        ours = errors.from_tf(error)
        return [type(ours).__name__, ours.message, time.monotonic() - begin]
    return ["none", "", 0.0]


def other_operation(v):
    with tfdist.DistributedGradientTape(op=tfdist.ReduceOp.SUM) as tape:
        loss = tf.add_n([tf.reduce_sum(w * w) for w in v])
    return tape.gradient(loss, v)


@pytest.mark.parametrize(
    "what",
    ["variables", *(pytest.param(x, marks=SLOW) for x in ("order", "operation"))],
)
def test_a_graph_that_changes_on_one_rank_is_a_mismatch_on_all(what):
    for kind, message, seconds in run_ranks(
        changed, 3, what, env={"TFDIST_TIMEOUT_S": "30"}
    ):
        assert kind == "MismatchError", message
        # Which of the two is seen first is chance.
        assert re.search("list of gradients|Deadlock", message)
        assert re.search("rank 1: |rank 1 waits", message)
        # Of the other two, a deadlock may hold one or both.
        assert re.search("ranks 0,2: |ranks? (0|2|0,2) waits? in", message)
        assert seconds < 15


def other_shape(what):
    """Under the name and the bucket of a group, rank 1 brings something else."""
    from tfdist.collectives.tf_ops import emit

    description = "w float32 [4]\nop=sum"
    group, _ = native.register_gradient_list(description, [True])

    def reduce(elements, dtype=tf.float32, op=tfdist.ReduceOp.SUM):
        return emit.allreduce(
            [tf.ones([elements], dtype)],
            "own",
            op,
            "1.0",
            "1.0",
            None,
            tensor_indices=[0],
            group=group,
            bucket=0,
            bucket_count=1,
        )

    for _ in range(3):
        reduce(4)
    begin = time.monotonic()
    try:
        if tfdist.rank() != 1:
            reduce(4)
        elif what == "shape":
            reduce(5)
        elif what == "dtype":
            reduce(4, tf.float64)
        else:
            reduce(4, op=tfdist.ReduceOp.MAX)
    except tf.errors.OpError as error:
        ours = errors.from_tf(error)
        return [type(ours).__name__, ours.message, time.monotonic() - begin]
    return ["none", "", 0.0]


@pytest.mark.parametrize(
    ("what", "text"),
    [("shape", "rank 1: [5]"), ("dtype", "rank 1: float64"), ("op", "rank 1: max")],
)
def test_another_request_under_a_predicted_name_is_a_mismatch_on_all(what, text):
    for kind, message, seconds in run_ranks(other_shape, 3, what):
        assert kind == "MismatchError", message
        assert text in message
        assert seconds < 15
