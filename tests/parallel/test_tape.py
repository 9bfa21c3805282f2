"""DistributedGradientTape and groups on several ranks."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native
from tfdist.gradients import reduction
from tfdist.gradients.options import ReduceOptions


def structures(in_graph):
    rank = tfdist.rank()
    w, b = tf.Variable([1.0, 2.0]), keras.Variable(3.0)

    def step():
        with tfdist.DistributedGradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(w * w) * (rank + 1) + b.value * rank
        nested = tape.gradient(loss, {"w": w, "rest": (b, [w])})
        single = tape.gradient(loss, b)
        scaled = tape.gradient(loss, [w], output_gradients=tf.constant(10.0))
        return nested["w"], nested["rest"][0], nested["rest"][1][0], single, scaled[0]

    return [g.numpy() for g in (tf.function(step) if in_graph else step)()]


@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_are_averaged_in_the_structure_of_the_sources(in_graph):
    for w, b, again, single, scaled in run_ranks(structures, 2, in_graph):
        np.testing.assert_array_equal(w, [3.0, 6.0])  # (1 + 2) / 2 * 2 w
        assert b == 0.5
        np.testing.assert_array_equal(again, w)
        assert single == 0.5
        np.testing.assert_array_equal(scaled, 10 * w)


def summed():
    v = tf.Variable(2.0)
    with tfdist.DistributedGradientTape(
        tf.GradientTape(), op=tfdist.ReduceOp.SUM
    ) as tape:
        loss = v * float(tfdist.rank() + 1)
    return tape.gradient(loss, v).numpy()


def test_sum_adds_the_ranks_gradients():
    assert [float(g) for g in run_ranks(summed, 3)] == [6.0] * 3


def unconnected(in_graph):
    a, b, c = (tf.Variable([float(i), 1.0]) for i in range(3))

    def step():
        with tfdist.DistributedGradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(a * 4.0)
            if tfdist.rank() == 1:
                loss += tf.reduce_sum(b * 6.0)
        found = tape.gradient(loss, [a, b, c])
        zeros = tape.gradient(
            loss, [c, a], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        assert found[2] is None
        return [found[0], found[1], zeros[0]]

    return [g.numpy() for g in (tf.function(step) if in_graph else step)()]


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_gradient_that_one_rank_lacks_counts_as_zeros(in_graph):
    for a, b, c in run_ranks(unconnected, 2, in_graph):
        assert a.tolist() == [4.0, 4.0]
        assert b.tolist() == [3.0, 3.0]
        assert c.tolist() == [0.0, 0.0]


def late_but_zero():
    """From step 2 on rank 1 uses a variable that nobody has used before."""
    a, b = tf.Variable(1.0), tf.Variable(3.0)
    found = []
    for step in range(4):
        with tfdist.DistributedGradientTape() as tape:
            loss = a * 2.0
            if step >= 2 and tfdist.rank() == 1:
                loss += b * 4.0
        grads = tape.gradient(
            loss, [a, b], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        found.append([float(g) for g in grads])
    return found


def test_with_zeros_for_what_is_not_used_a_variable_may_be_used_later():
    expected = [[2.0, 0.0], [2.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    assert run_ranks(late_but_zero, 2) == [expected, expected]


def behind_the_gate_again_and_again():
    """In the first start nobody has a gradient for the last variable."""
    found = []
    for count in (2, 3):
        tfdist.shutdown()
        tfdist.init()
        v = [tf.Variable(tf.zeros([4])) for _ in range(3)]
        own = [tf.fill([4], float(tfdist.rank() + 1))] * count + [None] * (3 - count)
        reduced = reduction.reduce_gradients(own, v, ReduceOptions(tfdist.ReduceOp.SUM))
        found.append([None if g is None else g.numpy()[0] for g in reduced])
    return found


def test_another_start_may_have_other_gradients_behind_the_gate():
    env = {"TFDIST_ATOMIC_STEPS": "1"}
    env |= dict.fromkeys(("TFDIST_FIRST_BUCKET_BYTES", "TFDIST_BUCKET_BYTES"), "16")
    env["TFDIST_FUSION_BYTES"] = "16"
    for found in run_ranks(behind_the_gate_again_and_again, 2, env=env):
        assert found == [[3.0, 3.0, None], [3.0, 3.0, 3.0]]


SMALL_BUCKETS = dict.fromkeys(
    ("TFDIST_FIRST_BUCKET_BYTES", "TFDIST_BUCKET_BYTES", "TFDIST_FUSION_BYTES"), "16"
)


def after_another_environment():
    """Rank 0 removes its variables, as before it starts a program that is no rank."""
    v = [tf.Variable(tf.ones([4])) for _ in range(4)]
    before = dict(os.environ)
    if tfdist.rank() == 0:
        for name in [name for name in os.environ if name.startswith("TFDIST_")]:
            del os.environ[name]
        os.environ["TFDIST_NOTHING"] = "1"
    try:
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(x) * (tfdist.rank() + 1) for x in v])
        found = [*tape.gradient(loss, v), *tfdist.grouped_allreduce([*v])]
        return [float(g[0]) for g in found]
    finally:
        os.environ.pop("TFDIST_NOTHING", None)
        os.environ.update(before)


@pytest.mark.parametrize("gate", ["0", "1"])
def test_what_the_environment_says_after_init_means_nothing(gate):
    env = {**SMALL_BUCKETS, "TFDIST_ATOMIC_STEPS": gate, "TFDIST_TIMEOUT_S": "30"}
    for found in run_ranks(after_another_environment, 2, env=env):
        assert found == [1.5] * 4 + [1.0] * 4


def an_error_in_an_eager_step():
    v = [tf.Variable(tf.ones([4])) for _ in range(4)]
    with tfdist.DistributedGradientTape(persistent=True) as tape:
        loss = tf.add_n([tf.reduce_sum(x) for x in v])
    try:
        tape.gradient(loss, v)  # the abort may come before it has ended on rank 0, too
        if tfdist.rank() == 1:
            native.abort("a reason of its own")
        tape.gradient(loss, v)
    except tf.errors.OpError as error:
        record = getattr(error, "record", None)
        return [type(error).__name__, error.message, record and record.rank]


@pytest.mark.parametrize("gate", ["0", "1"])
def test_an_eager_step_raises_the_errors_of_tfdist(gate):
    env = {**SMALL_BUCKETS, "TFDIST_ATOMIC_STEPS": gate, "TFDIST_TIMEOUT_S": "30"}
    for kind, message, rank in run_ranks(an_error_in_an_eager_step, 2, env=env):
        assert (kind, rank) == ("RankFailedError", 1)
        assert message.startswith("rank 1 (")
        assert "a reason of its own" in message


def embedding(dense):
    """One step of Adam on an embedding with repeated rows."""
    rows = [[0, 1, 1], [1, 3, 3]][tfdist.rank()]
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tfdist.DistributedGradientTape() as tape:
            if dense:
                taken = tf.one_hot(rows, 5) @ table.value
            else:
                taken = tf.gather(table.value, rows)
            loss = tf.reduce_sum(taken**2)
        optimizer.apply([tape.gradient(loss, table)], [table])
    return table.numpy()


def test_sparse_gradients_train_as_dense_ones_do():
    sparse, dense = run_ranks(embedding, 2, False), run_ranks(embedding, 2, True)
    np.testing.assert_array_equal(sparse[0], sparse[1])
    np.testing.assert_allclose(sparse[0], dense[0], rtol=1e-6)


def refused():
    v, x = tf.Variable(1.0), tf.constant(2.0)
    tape = tfdist.DistributedGradientTape(persistent=True)
    with tape:
        tape.watch(x)
        loss = v * x
    messages = []
    for call in (
        lambda: tape.gradient(loss, x),
        lambda: tape.jacobian(loss, v),
        lambda: tape.batch_jacobian(loss, v),
        lambda: tfdist.DistributedGradientTape(tape),
        lambda: tfdist.DistributedGradientTape(op=tfdist.ReduceOp.MAX),
    ):
        try:
            call()
            messages.append("accepted")
        except (TypeError, ValueError, NotImplementedError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_is_not_reduced_is_refused():
    [messages] = run_ranks(refused, 1)
    tensor, jacobian, batch_jacobian, tape, op = messages
    assert tensor.startswith("TypeError") and "tf.GradientTape" in tensor
    assert jacobian.startswith("NotImplementedError") and "jacobian()" in jacobian
    assert batch_jacobian == jacobian
    assert tape.startswith("TypeError") and "tf.GradientTape" in tape
    assert op.startswith("ValueError") and "AVERAGE, SUM or ADASUM" in op


@pytest.mark.parametrize("option", ["persistent", "watch_accessed_variables"])
def test_options_of_a_new_tape_are_refused_for_one_that_exists(option):
    value = option == "persistent"  # not the default
    with pytest.raises(ValueError, match="Pass these arguments to the tf.GradientTape"):
        tfdist.DistributedGradientTape(tf.GradientTape(), **{option: value})
    tfdist.DistributedGradientTape(**{option: value})


def mismatched(kind):
    rank = tfdist.rank()
    shape = [2 + rank] if kind == "shape" else [2]
    dtype = [tf.float32, tf.float64][rank] if kind == "dtype" else tf.float32
    variables = [tf.Variable(tf.zeros(shape, dtype), name=f"kernel_{kind}")]
    if kind == "count" and rank:
        variables.append(tf.Variable(1.0, name="one more"))
    op = tfdist.ReduceOp.SUM if kind == "op" and rank else tfdist.ReduceOp.AVERAGE

    @tf.function
    def step():
        reduction.reduce_gradients(
            [v * 1 for v in variables], variables, ReduceOptions(op)
        )
        variables[0].assign_add(tf.ones_like(variables[0]))

    try:
        step()
    except tfdist.MismatchError as error:
        return [str(error), float(tf.reduce_sum(variables[0]))]
    return None


@pytest.mark.parametrize("kind", ["shape", "dtype", "count", "op"])
def test_ranks_that_differ_get_an_error_on_all_before_the_first_step(kind):
    for message, changed in run_ranks(mismatched, 2, kind):
        assert changed == 0.0
        expected = {
            "shape": ["kernel_shape", "[2]", "[3]"],
            "dtype": ["kernel_dtype", "float32", "float64"],
            "count": ["one more"],
            "op": ["op=average", "op=sum"],
        }[kind]
        for words in expected:
            assert words in message


def dropout_of_a_branch():
    """Two towers whose groups have equal descriptions, in one function."""
    rank = float(tfdist.rank())
    a, b = (tf.Variable([1.0, 1.0], name="kernel") for _ in range(2))

    @tf.function
    def step():
        first = reduction.reduce_gradients([a * rank], [a])
        second = reduction.reduce_gradients([b * (rank + 10)], [b])
        return first[0], second[0]

    return [np.stack([g.numpy() for g in step()]) for _ in range(20)]


def test_equal_groups_in_one_function_are_not_mixed_up():
    for results in run_ranks(dropout_of_a_branch, 2):
        for result in results:
            np.testing.assert_array_equal(result, [[0.5, 0.5], [10.5, 10.5]])
