"""Gradients that are `None` at first and come later, or come and go, on some ranks."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

# For each step, the variables that each rank's loss uses; 0 is in use from the start.
TIMES = {
    "one rank later": [["0", "0"], ["0", "01"], ["0", "0"], ["01", "01"]],
    "never by all": [["0", "0", "0"], ["2", "0", "0"], ["1", "2", "0"], ["0", "1", ""]],
    "one rank first": [["0", "01"], ["0", "0"], ["0", ""], ["01", "0"], ["2", "2"]],
}


def gradients(step, rank, used):
    """Of three variables; None for those that are not used."""
    rng = np.random.default_rng([step, rank])
    values = [rng.normal(size=(3,)) for _ in range(3)]
    return [g if str(i) in used else None for i, g in enumerate(values)]


def mean_of(ranks):
    """What one process gets: None counts as zeros, unless nobody has one."""
    if all(g is None for g in ranks):
        return None
    return sum(np.zeros(3) if g is None else g for g in ranks) / len(ranks)


@in_float64
def train(times, alone):
    """With Adam, which moves a variable too whose gradient is zeros."""
    v = [keras.Variable(np.full(3, 1.0 + i), name=f"v{i}") for i in range(3)]
    optimizer = keras.optimizers.Adam(0.1)
    if not alone:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    optimizer.build(v)
    for step, used in enumerate(times):
        if alone:
            ranks = [gradients(step, r, u) for r, u in enumerate(used)]
            grads = [mean_of(g) for g in zip(*ranks, strict=True)]
        else:
            grads = gradients(step, tfdist.rank(), used[tfdist.rank()])
        optimizer.apply([g if g is None else tf.constant(g) for g in grads], v)
    slots = [s for s in optimizer.variables if not s.path.endswith("learning_rate")]
    return [x.numpy() for x in [*v, *slots]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("one rank later", marks=pytest.mark.slow),
        "never by all",
        pytest.param("one rank first", marks=pytest.mark.slow),
    ],
)
def test_eager_steps_use_the_gradients_that_some_rank_has_in_that_step(name):
    times = TIMES[name]
    ranks = run_ranks(train, len(times[0]), times, False)
    assert_like_one_process(ranks, train(times, True), name)


def count_messages(lacks):
    """Operations of four eager steps: with and without gaps at the first."""
    v = [tf.Variable([1.0], name=f"{i}{lacks}") for i in range(2)]
    for step in range(5):
        if step == 1:
            native.take_records()
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(v[0] * 2.0)
            if not lacks and step == 0:
                loss += tf.reduce_sum(v[1])
        found = tape.gradient(loss, v)
    tfdist.barrier()
    names = [r["name"] for r in native.take_records() if r["kind"] == native.ALLREDUCE]
    names = [name for name in names if not name.startswith("comparison of weights")]
    return len(names), None if found[1] is None else float(found[1][0])


def test_only_lists_with_gaps_at_first_pay_for_it():
    for count, last in run_ranks(count_messages, 2, False):
        assert (count, last) == (4, 0.0)  # and what is None later counts as zeros
    for count, last in run_ranks(count_messages, 2, True):
        assert (count, last) == (8, None)


def accumulated():
    """Rank 1 has a gradient for the second variable from its third batch on."""
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    v = [tf.Variable(0.0, name=f"sum{i}") for i in range(2)]
    for step in range(4):
        late = tfdist.rank() == 1 and step >= 2
        optimizer.apply([tf.constant(1.0), tf.constant(4.0) if late else None], v)
    return [float(x) for x in v]


@pytest.mark.slow
def test_with_accumulation_too():
    assert run_ranks(accumulated, 2) == [[-2.0, -2.0]] * 2


def table_turns_dense():
    """A table that was reduced by rows has a dense gradient on one rank at last."""
    table = tf.Variable(tf.zeros((4, 2)))
    found = []
    for step in range(3):
        with tfdist.DistributedGradientTape(sparse_as_dense=False) as tape:
            loss = tf.reduce_sum(tf.gather(table, [tfdist.rank(), 3]))
            if step == 1 and tfdist.rank() == 1:
                loss += tf.reduce_sum(table)
        grad = tape.gradient(loss, table)
        found.append([type(grad).__name__, tf.convert_to_tensor(grad).numpy()])
    return found


@pytest.mark.slow
def test_a_table_may_be_dense_in_some_steps():
    rows = np.array([[0.5, 0.5], [0.5, 0.5], [0, 0], [1, 1]])
    for found in run_ranks(table_turns_dense, 2):
        kinds, values = zip(*found, strict=True)
        assert [kind == "IndexedSlices" for kind in kinds] == [True, False, True]
        np.testing.assert_array_equal(values, [rows, rows + 0.5, rows])


def fit_twice(heads):
    """First one head of a model, then the other, each with an optimizer of its own."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    image = keras.Input((2,))
    trunk = keras.layers.Dense(3)(image)
    model = keras.Model(
        image, {name: keras.layers.Dense(1, name=name)(trunk) for name in "ab"}
    )
    x = np.ones((4, 2), "float32")
    moved = []
    for head in heads:
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            loss={head: "mse"},
            jit_compile=False,
        )
        before = [w.numpy() for w in model.weights]
        model.fit(x, {head: x[:, :1]}, batch_size=2, verbose=0)
        now = [w.numpy() for w in model.weights]
        moved.append(
            [not np.array_equal(a, b) for a, b in zip(before, now, strict=True)]
        )
    return moved


def test_another_head_in_a_second_fit_is_traced_anew_by_all_ranks():
    trunk, a, b = [True, True], [True, True, False, False], [False, False, True, True]
    for moved in run_ranks(fit_twice, 2, "ab"):
        assert moved == [trunk + a, trunk + b]


def traces_alone(names):
    """Rank 0 traces its function anew, and alone has a gradient that nobody had."""
    v = [tf.Variable([1.0], name=name) for name in names]

    @tf.function
    def step(both):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(v[0] * 2.0 + (v[1] if both else 0.0))
        return tape.gradient(loss, v)[0][0]

    step(False)
    return outcome(lambda: step(tfdist.rank() == 0))


def test_a_trace_of_one_rank_alone_is_an_error_on_all_ranks():
    env = {"TFDIST_TIMEOUT_S": "20"}
    for late in run_ranks(traces_alone, 2, ["one", "two"], env=env):
        assert late["class"] == "MismatchError", late
        # Which of the two is seen first is chance.
        assert re.search("late_gradients=1|Deadlock", late["message"])
        assert late["seconds"] < 5


def eagerly_on_one_rank():
    v = tf.Variable([1.0], name="of both")

    def step():
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(v * 2.0)
        return tape.gradient(loss, v)

    return outcome(step if tfdist.rank() else tf.function(step))


def test_eager_on_one_rank_and_in_a_graph_on_another_is_an_error_on_both():
    for found in run_ranks(eagerly_on_one_rank, 2):
        assert found["class"] == "MismatchError"
        assert "eager" in found["message"] and "call=0" in found["message"]
