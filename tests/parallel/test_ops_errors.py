"""What the ranks see when they disagree, when one fails, is cancelled, or is late."""

import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import RankError, run_ranks

import tfdist
from tfdist.collectives import ReduceOp
from tfdist.core import native

# ---- mismatches ----


def call_with(what, rank):
    """A call of rank 1 that differs from that of the others in one respect."""
    odd = rank == 1
    x = tf.ones([3 if odd and what == "shape" else 2])
    if what == "dtype" and odd:
        x = tf.cast(x, tf.float64)
    if what == "rows":
        return lambda: tfdist.allgather(tf.ones([2, 3 if odd else 4]), name="x")
    if what == "root":
        return lambda: tfdist.broadcast(x, 1 if odd else 0, name="x")
    if what == "kind":
        function = tfdist.broadcast if odd else tfdist.allreduce
        return lambda: function(x, name="x")
    options = {}
    if what == "op":
        options["op"] = ReduceOp.MAX if odd else ReduceOp.SUM
    if what == "prescale":
        options["prescale"] = 0.5 if odd else 1.0
    if what == "number":
        xs = [x] * (2 if odd else 3)
        return lambda: tfdist.grouped_allreduce(xs, name="x")
    if what == "order":
        large, small, count = tf.ones([16384]), tf.ones([3]), tf.ones([], tf.int32)
        rest = [small, small, count] if odd else [count, small, small]
        return lambda: tfdist.grouped_allreduce(
            [large, *rest], name="x", op=ReduceOp.SUM
        )
    return lambda: tfdist.allreduce(x, name="x", **options)


def mismatch(what, compiled):
    call = call_with(what, tfdist.rank())
    if compiled:
        call = tf.function(call)
        call.get_concrete_function()  # tracing is not what is timed
    tfdist.barrier()
    return outcome(call)


VALUES = {
    "shape": ("[2]", "[3]"),
    "dtype": ("float32", "float64"),
    "rows": ("4", "3"),
    "root": ("0", "1"),
    "kind": ("allreduce", "broadcast"),
    "op": ("sum", "max"),
    "prescale": ("1", "0.5"),
    "number": ("3", "2"),
    "order": ("[0,2,3]", "[0,1,2]"),
}


@pytest.mark.parametrize(
    ("what", "compiled"),
    [
        *((what, False) for what in VALUES),
        *((what, True) for what in ("shape", "kind")),
        *(
            pytest.param(what, True, marks=pytest.mark.slow)
            for what in VALUES
            # "order" has two operations that differ. Which one is reported depends on
            # which one fails first.
            if what not in ("shape", "kind", "order")
        ),
    ],
)
def test_a_mismatch_is_an_error_on_all_ranks_naming_both_values(what, compiled):
    for result in run_ranks(mismatch, 3, what, compiled):
        assert result["class"] == "MismatchError", result
        assert result["raised"] == (
            "FailedPreconditionError" if compiled else "MismatchError"
        )
        assert result["seconds"] < 10.0
        assert result["record"]["kind"] == "mismatch"
        assert result["record"]["tensor"] == "x"
        message = result["message"]
        assert "x" in message and "rank" in message and "1" in message
        for value in VALUES[what]:
            assert value in message


def after_a_mismatch():
    first = outcome(lambda: tfdist.allreduce(tf.ones([1 + tfdist.rank()]), name="x"))
    second = tfdist.allreduce(tf.ones([2]), name="y", op=ReduceOp.SUM)
    return first["class"], second.numpy().tolist()


def test_after_a_mismatch_the_ranks_can_go_on():
    assert run_ranks(after_a_mismatch, 2) == [["MismatchError", [2.0, 2.0]]] * 2


class Uneven(keras.layers.Layer):
    """Reduces a tensor whose length differs between ranks."""

    def __init__(self, traced):
        super().__init__()
        self.reduce = tf.function(self.own_length) if traced else self.own_length

    def own_length(self):
        return tfdist.allreduce(tf.ones([2 + tfdist.rank()]), name="uneven")

    def call(self, x):
        return x + tf.reduce_sum(self.reduce())


def fit_eagerly(traced):
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(Uneven(traced)(inputs))
    model = keras.Model(inputs, outputs)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse", run_eagerly=True)
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    return outcome(
        lambda: model.fit(
            *(np.ones((2, 3)), np.ones((2, 1))), verbose=0, callbacks=callbacks
        )
    )


@pytest.mark.parametrize("traced", [False, True])
def test_an_eager_layer_in_fit_raises_the_error_of_its_collective(traced):
    for found in run_ranks(fit_eagerly, 2, traced):
        assert found["raised"] == "MismatchError"
        assert "uneven" in found["message"]


def no_such_root():
    return outcome(lambda: tfdist.broadcast(tf.ones([2]), 2))


def test_a_root_that_does_not_exist_is_an_invalid_argument():
    for result in run_ranks(no_such_root, 2):
        assert result["class"] == "InvalidArgumentError"
        assert "2" in result["message"]


def no_such_root_in_a_function():
    step = tf.function(lambda: tfdist.broadcast(tf.ones([2]), 2))
    step.get_concrete_function()  # where it runs is not known yet
    return outcome(step)


def test_in_a_function_the_operation_checks_the_root():
    for result in run_ranks(no_such_root_in_a_function, 2):
        assert result["class"] == "InvalidArgumentError"
        assert "[0, 2), got 2" in result["message"]


# ---- deadlines ----


def late():
    x = tf.ones([2])
    tfdist.barrier()
    if tfdist.rank() == 1:
        time.sleep(3.0)
        return None
    return outcome(lambda: tfdist.allreduce(x, name="late", timeout_s=0.5))


def test_a_rank_that_does_not_come_is_named_after_the_deadline():
    first = run_ranks(late, 2)[0]
    assert first["class"] == "TimeoutError", first
    assert 0.4 < first["seconds"] < 2.9
    assert first["record"]["tensor"] == "late"
    assert "late" in first["message"]
    assert "rank 1" in first["message"]


# ---- cancellation ----


def sibling_fails():
    """On rank 1 another node of the function fails while the allreduce waits."""

    def fail(x):
        if tfdist.rank() == 1 and started:
            time.sleep(0.2)
            raise ValueError("disk full")
        return x

    @tf.function
    def step(x, y):
        return tfdist.allreduce(x, name="pending"), tf.py_function(
            fail, [y], tf.float32
        )

    started = False
    step(tf.ones([2]), tf.ones([]))
    tfdist.barrier()
    started = True
    begin = time.monotonic()
    if tfdist.rank() == 0:  # comes after the failure, 0.2 s from now
        time.sleep(3.0)
        begin = time.monotonic()
    result = outcome(lambda: step(tf.ones([2]), tf.ones([])))
    result["end"] = time.monotonic()
    result["failed_at"] = begin + 0.2
    return result


def test_a_step_that_fails_ends_at_once_and_the_others_learn_who():
    late_rank, failing, waiting = run_ranks(sibling_fails, 3)
    assert failing["class"] == "InvalidArgumentError", failing
    assert "disk full" in failing["message"]
    assert failing["seconds"] < 0.2 + 2.5
    assert waiting["class"] == "RankFailedError", waiting
    assert waiting["record"]["rank"] == 1
    assert "rank 1" in waiting["message"]
    assert waiting["end"] - failing["failed_at"] < 2.5
    assert late_rank["class"] == "RankFailedError", late_rank
    assert late_rank["record"]["rank"] == 1
    assert late_rank["seconds"] < 10.0


def starts_in_a_cancelled_step():
    """On rank 1 the step fails while the input of the allreduce is being computed."""
    rank = tfdist.rank()
    sleep_s = tf.Variable(0.0)

    def slow(x):
        time.sleep(float(sleep_s))
        return x

    def fail(x):
        if rank == 1:
            raise ValueError("disk full")
        return x

    @tf.function
    def step(x):
        y = tf.ensure_shape(tf.py_function(slow, [x], tf.float32), [2])
        failing = tf.numpy_function(fail, [x], tf.float32, stateful=False)
        return tfdist.allreduce(y, name="late"), failing

    step.get_concrete_function(tf.ones([2]))
    tfdist.barrier()
    native.take_records()
    sleep_s.assign(0.3 if rank == 1 else 3.0)
    result = outcome(lambda: step(tf.ones([2])))
    result["ran"] = [row["name"] for row in native.take_records()]
    return result


@pytest.mark.slow
def test_an_operation_that_starts_in_a_cancelled_step_ends_and_tells_the_others():
    waiting, failing = run_ranks(starts_in_a_cancelled_step, 2)
    assert "disk full" in failing["message"], failing
    assert failing["seconds"] < 0.3 + 2.5
    assert failing["ran"] == ["late"]
    assert waiting["class"] == "RankFailedError", waiting
    assert waiting["record"]["rank"] == 1


def fails_before_the_operation():
    """The node that fails comes first, so that no operation is there to cancel."""

    @tf.function
    def step(x):
        x = tf.debugging.check_numerics(x, "not a number")
        return tfdist.allreduce(x, name="never")

    step(tf.ones([2]))
    tfdist.barrier()
    if tfdist.rank() == 1:
        time.sleep(0.2)  # the end of the barrier comes from rank 0, by another link
        step(tf.fill([2], np.nan))  # ends the program: its hook tells the others
    result = outcome(lambda: step(tf.ones([2])))
    assert result["class"] == "RankFailedError", result
    assert result["record"]["rank"] == 1
    assert result["seconds"] < 10.0


def test_an_exception_that_ends_the_program_reaches_the_others():
    with pytest.raises(RankError, match="rank 1 failed first(?s:.)*not a number") as e:
        run_ranks(fails_before_the_operation, 2)
    assert "rank 0 then" not in str(e.value)


def fails_between_two_operations():
    """An exception of the program itself, of which no operation can know."""
    x = tfdist.allreduce(tf.ones([2]), name="first")
    tfdist.barrier()
    if tfdist.rank() == 1:
        time.sleep(0.2)  # the end of the barrier comes from rank 0, by another link
        raise KeyError("no such label")  # its hook tells the others
    result = outcome(lambda: tfdist.allreduce(x, name="second"))
    assert result["class"] == "RankFailedError", result
    assert result["record"]["rank"] == 1
    assert "rank 1" in result["message"]
    assert "no such label" in result["message"]
    assert result["seconds"] < 10.0


def test_an_exception_between_two_eager_operations_reaches_the_others():
    words = "rank 1 failed first(?s:.)*no such label"
    with pytest.raises(RankError, match=words) as e:
        run_ranks(fails_between_two_operations, 3)
    assert "then: " not in str(e.value)


def own_exception():
    tfdist.barrier()
    begin = time.monotonic()
    if tfdist.rank() == 1:
        time.sleep(0.2)  # an abort may overtake the announcement of the barrier
        native.abort("ValueError: no such file")
        return None
    result = outcome(lambda: tfdist.allreduce(tf.ones([2]), name="x"))
    result["seconds"] = time.monotonic() - begin
    return result


def test_an_abort_names_the_rank_and_its_cause_everywhere():
    results = run_ranks(own_exception, 3)
    for result in (results[0], results[2]):
        assert result["class"] == "RankFailedError", result
        assert result["record"]["rank"] == 1
        assert "no such file" in result["message"]
        assert result["seconds"] < 10.0


def cancel_at_many_moments(rounds):
    """In each round, in a new world, a sibling fails a little later."""
    rank = tfdist.rank()
    delay_s = tf.Variable(0.0)

    def fail(x):
        time.sleep(float(delay_s))
        if rank == 1:
            raise ValueError("own")
        return x

    @tf.function
    def step(x):
        ys = [tfdist.allreduce(x, name=f"t{i}", timeout_s=20.0) for i in range(4)]
        return ys, tf.py_function(fail, [x], tf.float32)

    classes = []
    for number in range(rounds):
        delay_s.assign(2e-4 * (number if rank else rounds - number))
        classes.append(outcome(lambda: step(tf.ones([2])))["class"])
        tfdist.shutdown()
        tfdist.init()
    return classes


def test_steps_that_are_cancelled_at_any_moment_end():
    results = run_ranks(cancel_at_many_moments, 2, 20)
    # Whether an operation was done before the sibling failed is a matter of luck.
    assert set(results[1]) == {"InvalidArgumentError"}
    assert set(results[0]) <= {"none", "RankFailedError"}


# ---- death ----


def killed():
    tfdist.allreduce(tf.ones([2]))
    tfdist.barrier()
    if tfdist.rank() == 1:
        time.sleep(0.2)  # its end may overtake the announcement of the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: tfdist.allreduce(tf.ones([2]), name="x"))


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_rank_is_named_and_its_worker_comes_back():
    results = run_ranks(killed, 3, may_die=[1])
    assert results[1] == -signal.SIGKILL
    for result in (results[0], results[2]):
        assert result["class"] == "RankFailedError", result
        assert result["record"]["rank"] == 1
        assert result["seconds"] < 5.0
    assert run_ranks(after_a_mismatch, 2)[1][1] == [2.0, 2.0]
