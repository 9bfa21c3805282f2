"""Functions and branches that reduce in one function, and several sets in one."""

import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist


def late(x, rank):
    """The same tensor, later on one rank."""

    def wait(value):
        if tfdist.rank() == rank:
            time.sleep(0.3)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, False), x.shape)


def gradient_of(weights, loss):
    with tfdist.DistributedGradientTape() as tape:
        value = loss(weights)
    return tape.gradient(value, [weights])[0]


def steps_of(train):
    """What three steps give; the ranks' average of x is [1.5, 4]."""
    x = tf.constant([1.0 + tfdist.rank(), 4.0])
    return [[g.numpy().tolist() for g in train(x)] for _ in range(3)]


def two_functions():
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def linear(x):
        return gradient_of(weights, lambda w: tf.reduce_sum(w * x))

    @tf.function
    def tenfold(x):
        return gradient_of(weights, lambda w: tf.reduce_sum(10.0 * w * x))

    @tf.function
    def train(x):
        return linear(late(x, 0)), tenfold(late(x, 1))

    return steps_of(train)


def one_function_twice():
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient(x):
        return gradient_of(weights, lambda w: tf.reduce_sum(w * x))

    @tf.function
    def middle(x):  # the call is found through a branch
        return tf.cond(tf.size(x) > 1, lambda: gradient(x), lambda: x)

    @tf.function
    def train(x):
        return middle(late(x, 0)), middle(late(10.0 * x, 1))

    return steps_of(train)


def in_two(control_flow):
    """Two calls of one function with an operation, each inside `control_flow`."""
    weights = tf.Variable([1.0, 1.0])

    @tf.function
    def total(x):
        return tfdist.allreduce(x * weights, op=tfdist.ReduceOp.AVERAGE)

    @tf.function
    def train(x):
        first, second = late(x, 0), late(10.0 * x, 1)
        return control_flow(total, first), control_flow(total, second)

    return steps_of(train)


def two_branches():
    return in_two(lambda f, x: tf.cond(tf.size(x) > 1, lambda: f(x), lambda: x))


def two_cases():
    return in_two(
        lambda f, x: tf.switch_case(tf.size(x) - 1, [lambda: x, lambda: f(x)])
    )


def two_loops():
    def once(f, x):
        body = lambda i, y: (i + 1, f(y))  # noqa: E731
        return tf.while_loop(lambda i, _: i < tf.size(x) - 1, body, (0, x))[1]

    return in_two(once)


def a_function_beside_a_tape():
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient(x):
        return gradient_of(weights, lambda w: tf.reduce_sum(w * x))

    @tf.function
    def train(x):
        inner = gradient(late(x, 0))
        y = late(10.0 * x, 1)
        return inner, gradient_of(weights, lambda w: tf.reduce_sum(w * y))

    return steps_of(train)


def plain_operations():
    return in_two(lambda f, x: f(x))


@pytest.mark.parametrize(
    "program",
    [
        two_functions,
        plain_operations,
        two_branches,
        two_cases,
        two_loops,
        pytest.param(one_function_twice, marks=pytest.mark.slow),
        pytest.param(a_function_beside_a_tape, marks=pytest.mark.slow),
    ],
)
def test_calls_that_only_read_variables_are_paired_in_the_order_of_the_program(program):
    for results in run_ranks(program, 2):
        assert results == [[[1.5, 4.0], [15.0, 40.0]]] * 3


def traced_by_one_rank_first():
    """The error of a function that another one calls, which rank 0 has traced alone."""
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def inner(x):
        return gradient_of(weights, lambda w: tf.reduce_sum(w * x))

    @tf.function
    def outer(x):
        return inner(x)

    x = tf.constant([1.0, 2.0])
    try:
        if tfdist.rank() == 0:
            inner.get_concrete_function(x)
        outer(x)
    except tfdist.MismatchError as error:
        return str(error)
    return ""


def test_a_function_that_one_rank_traces_first_is_named():
    for message in run_ranks(traced_by_one_rank_first, 2):
        assert "have traced them in inner and in outer/inner: call the same" in message


def a_set_and_all():
    pair = tfdist.add_process_set([0, 1])

    @tf.function
    def step(x):
        own = tfdist.allreduce(x, process_set=pair) if pair.included() else x
        again = (
            tfdist.allreduce(x, name="mine", process_set=pair) if pair.included() else x
        )
        return tfdist.allreduce(own), tfdist.allreduce(again, name="mine")

    x = tf.constant([3.0 * tfdist.rank()])
    return [float(y[0]) for y in step(x)]


def test_the_calls_of_a_set_do_not_move_the_names_of_the_others_calls():
    assert run_ranks(a_set_and_all, 3) == [[3.0, 3.0]] * 3


def overlapping_sets():
    left, right = tfdist.add_process_set([0, 1]), tfdist.add_process_set([1, 2])
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def step(x):
        gradients = []
        for one in (left, right):
            if not one.included():
                continue
            with tfdist.DistributedGradientTape(process_set=one) as tape:
                loss = tf.reduce_sum(weights * x)
            gradients.append(tape.gradient(loss, [weights])[0])
        return gradients

    x = tf.constant([2.0 * tfdist.rank(), 0.0])
    return [float(np.asarray(g)[0]) for g in step(x)]


def test_tapes_of_overlapping_sets_share_a_function():
    assert run_ranks(overlapping_sets, 3) == [[1.0], [1.0, 3.0], [3.0]]
