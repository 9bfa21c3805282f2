"""send and recv: values, who takes part, gradients through several ranks, mistakes."""

import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp
from tfdist.core import native

DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e5m2", "float8_e4m3fn"),
]
CASES = [
    *(((7, 3), dtype) for dtype in DTYPES),
    *((shape, "float32") for shape in [(), (0,), (2, 0, 3), (40_000,)]),
]


def numbers(rank, shape, dtype):
    rng = np.random.default_rng([rank, len(shape), sum(shape)])
    return rng.integers(0, 5, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def ring():
    """Every rank sends to the next one and receives from the one before, at once."""
    rank, size = tfdist.rank(), tfdist.size()

    @tf.function(autograph=False)
    def step(xs):
        for x in xs:
            tfdist.send(x, (rank + 1) % size)
        left = (rank - 1) % size
        return [tfdist.recv(x.shape, x.dtype, left) for x in xs]

    xs = [tf.constant(numbers(rank, *case)) for case in CASES]
    return [[list(y.shape), y.dtype.name, y.numpy().tobytes()] for y in step(xs)]


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_values_arrive_as_they_were_sent(size):
    for rank, results in enumerate(run_ranks(ring, size)):
        sender = (rank - 1) % size
        expected = [numbers(sender, *case) for case in CASES]
        for (shape, dtype, data), want in zip(results, expected, strict=True):
            assert shape == list(want.shape)
            assert dtype == want.dtype.name
            assert data == want.tobytes()


def eager_conversation():
    """Rank 2 takes part in nothing, and comes only when the others are done."""
    rank = tfdist.rank()
    begin = time.monotonic()
    heard = []
    if rank == 0:
        for i in range(3):
            sent = tfdist.send(tf.constant([float(i)] * (i + 1)), 1)
            assert sent.numpy() == 0.0
            heard.append(tfdist.recv(tf.TensorShape([]), tf.int32, 1).numpy().tolist())
    elif rank == 1:
        for i in range(3):
            heard.append(tfdist.recv([i + 1], "float32", 0).numpy().tolist())
            tfdist.send(i * 10, 0)
    else:
        time.sleep(2.0)
    seconds = time.monotonic() - begin
    tfdist.barrier()
    return heard, seconds


def test_two_ranks_talk_while_a_third_does_something_else():
    first, second, _ = run_ranks(eager_conversation, 3)
    assert first[0] == [0, 10, 20]
    assert second[0] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    assert max(first[1], second[1]) < 2.0


def several_partners():
    """Each rank counts its calls for each partner apart, so that the names agree."""
    rank = tfdist.rank()

    @tf.function
    def step():
        if rank == 0:
            for dst in (1, 2, 1):
                tfdist.send(tf.constant([dst, 100]), dst)
            for dst in (2, 1):
                tfdist.send(tf.constant([dst, 200]), dst, name="named")
            return [tf.constant(0)]
        count = 2 if rank == 1 else 1
        received = [tfdist.recv([2], tf.int32, 0) for _ in range(count)]
        return [*received, tfdist.recv([2], tf.int32, 0, name="named")]

    return [[y.numpy().tolist() for y in step()] for _ in range(2)]


def test_a_rank_may_send_to_several_ranks_in_one_function():
    _, first, second = run_ranks(several_partners, 3)
    assert first == [[[1, 100], [1, 100], [1, 200]]] * 2
    assert second == [[[2, 100], [2, 200]]] * 2


# ---- gradients ----

X = np.array([[0.5, -1.0], [2.0, 1.5], [0.25, 3.0]])
WEIGHTS = [np.array([[0.3, -0.2], [0.1, 0.7]]) * (r + 1) for r in range(3)]


def layer(h, w):
    return tf.tanh(h @ w)


def pipeline(compiled):
    """A layer on each rank; the loss is on the last one."""
    rank, last = tfdist.rank(), tfdist.size() - 1
    w = tf.Variable(WEIGHTS[rank])

    def step():
        with tf.GradientTape() as tape:
            h = X if rank == 0 else tfdist.recv(X.shape, tf.float64, rank - 1, after=w)
            h = layer(h, w)
            loss = tf.reduce_sum(h**2) if rank == last else tfdist.send(h, rank + 1)
        return loss, tape.gradient(loss, w)

    step = tf.function(step) if compiled else step
    results = [step() for _ in range(2)]
    return [[loss.numpy().tolist(), gradient.numpy()] for loss, gradient in results]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_go_back_through_a_chain_of_ranks(compiled):
    weights = [tf.constant(w) for w in WEIGHTS]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = tf.constant(X)
        for w in weights:
            h = layer(h, w)
        loss = tf.reduce_sum(h**2)
    expected = tape.gradient(loss, weights)
    for rank, results in enumerate(run_ranks(pipeline, 3, compiled)):
        for value, gradient in results:
            assert value == pytest.approx(float(loss) if rank == 2 else 0.0)
            np.testing.assert_allclose(gradient, expected[rank], rtol=1e-12)


def sent_beside_an_own_loss():
    """The own loss and what the receiver makes of the tensor both count."""
    rank = tfdist.rank()
    w = tf.constant([2.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(w)
        if rank == 0:
            loss = tf.reduce_sum(w) + tfdist.send(w * w, 1)
        else:
            loss = tf.reduce_sum(w * tfdist.recv([2], tf.float32, 0, after=w))
    return tape.gradient(loss, w).numpy().tolist()


def test_the_gradient_of_the_receiver_is_added():
    first, second = run_ranks(sent_beside_an_own_loss, 2)
    assert first == [1.0 + 2.0 * 4.0, 1.0 + 3.0 * 6.0]  # 1 + w1 * 2 w0
    assert second == [4.0, 9.0]


# ---- mistakes ----


def mismatch(what, compiled):
    rank = tfdist.rank()
    shape = [3] if what == "shape" else [2]
    dtype = tf.float64 if what == "dtype" else tf.float32

    def step():
        if rank == 0:
            return tfdist.send(tf.ones([2]), 1, name="x")
        return tfdist.recv(shape, dtype, 0, name="x")

    result = None
    if rank < 2:
        result = outcome(tf.function(step) if compiled else step)
    after = tfdist.allreduce(tf.ones([2]), op=ReduceOp.SUM).numpy().tolist()
    return result, after


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "what, values", [("shape", ("[2]", "[3]")), ("dtype", ("float32", "float64"))]
)
def test_another_shape_or_dtype_is_an_error_on_both(what, values, compiled):
    results = run_ranks(mismatch, 3, what, compiled)
    assert [after for _, after in results] == [[3.0, 3.0]] * 3
    for result, _ in results[:2]:
        assert result["class"] == "MismatchError", result
        assert result["seconds"] < 5.0  # far below the deadline of 60 s
        assert '"x from 0 to 1"' in result["message"]
        for value in values:
            assert value in result["message"]


def wrong_partner():
    rank, size = tfdist.rank(), tfdist.size()
    return [
        outcome(lambda dst=dst: tfdist.send(tf.ones([2]), dst)) for dst in (rank, size)
    ]


def test_a_partner_that_does_not_exist_is_refused_at_once():
    for results in run_ranks(wrong_partner, 2):
        for result in results:
            assert result["class"] == "InvalidArgumentError", result
            assert "two different ranks in [0, 2)" in result["message"]


def nobody_receives():
    if tfdist.rank() == 0:
        result = outcome(lambda: tfdist.send(tf.ones([2]), 1, name="x", timeout_s=0.5))
    else:
        time.sleep(1.5)
        result = None
    return result


def test_a_partner_that_does_not_come_is_named_after_the_deadline():
    result = run_ranks(nobody_receives, 2)[0]
    assert result["class"] == "TimeoutError", result
    assert "rank 1" in result["message"] and "x from 0 to 1" in result["message"]


def bytes_of_a_pair():
    """What is sent goes from one rank to one other: no third rank sees a byte."""

    @tf.function
    def step(x):
        if tfdist.rank() == 0:
            return tfdist.send(x, 1)
        return tfdist.recv([1000], tf.float32, 0)

    if tfdist.rank() < 2:
        step(tf.ones([1000]))
    tfdist.barrier()
    sent = {str(k["peer"]): k["data_bytes_sent"] for k in native.counters()["links"]}
    tfdist.barrier()  # the link to a rank that has left is gone, and its count
    return sent


def test_only_the_sender_sends():
    first, second, third = run_ranks(bytes_of_a_pair, 3)
    assert first == {"1": 4000, "2": 0}
    assert set(second.values()) | set(third.values()) == {0}
