"""Ranks that wait for each other end soon, and the error says where each is."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import BroadcastInitialState, MetricAverage, RankZeroOnly

SECONDS = 20.0  # of 300 until the deadline; with what they trace on a busy machine


def made():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25))
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(50 + tfdist.rank())
    x = rng.normal(size=(16, 2)).astype("float32")
    return model, x, x[:, :1]


def steps():
    model, x, y = made()
    model.fit(x[:8], y[:8], batch_size=4, verbose=0, callbacks=[MetricAverage()])
    n = 16 if tfdist.rank() == 0 else 8
    model.fit(x[:n], y[:n], batch_size=4, verbose=0, callbacks=[MetricAverage()])


def branch():
    if tfdist.rank() == 0:
        tfdist.allreduce(1.0)
    else:
        tfdist.broadcast_object("x")


def traced_before():
    """A function that was traced before cannot be refused where it is called."""
    model, x, y = made()
    total = tf.function(lambda: tfdist.allreduce(tf.ones(2)))
    total()
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: total())
    callbacks = [BroadcastInitialState(), RankZeroOnly(own)]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)


def graphs():
    reduces = tf.function(lambda: tfdist.allreduce(tf.ones(2)))
    gathers = tf.function(lambda: tfdist.allgather(tf.ones(2)))
    (reduces if tfdist.rank() == 0 else gathers)()


def ends_alone():
    """One rank stops after the second epoch of four."""
    model, x, y = made()

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1 and tfdist.rank() == 1

    callbacks = [BroadcastInitialState(), MetricAverage(), Stops()]
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)


def leaves():
    """One rank takes three steps of five, and ends."""
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        variable.assign_sub(0.1 * tape.gradient(loss, variable))

    for _ in range(5 - 2 * tfdist.rank()):
        step()


def one(which):
    return outcome(globals()[which])


def check(results, *parts, raised="MismatchError"):
    for own in results:
        assert own["class"] == "MismatchError", own
        assert own["raised"] == raised
        assert "Deadlock: no rank can continue" in own["message"]
        for part in parts:
            assert part in own["message"], own["message"]
        assert own["seconds"] < SECONDS


def test_unequal_numbers_of_steps():
    check(
        run_ranks(one, 2, "steps"),
        "rank 0 waits in step 3 of epoch 1 of model.fit (test_deadlock.py:",
        "rank 1 waits in MetricAverage at the end of epoch 1 (test_deadlock.py:",
        "UnevenData",
    )


@pytest.mark.slow
def test_a_fit_that_ends_on_one_rank_alone():
    check(
        run_ranks(one, 2, "ends_alone"),
        "rank 0 waits in BroadcastInitialState before step 1 of epoch 3 (test_",
        "rank 1 waits in BroadcastInitialState at the end of fit, after epoch 2 (test",
        "StopTogether",
    )


def test_a_rank_that_leaves_a_loop_early_is_told_with_its_steps():
    stays, ends = run_ranks(one, 2, "leaves")
    assert ends["class"] == "none"
    assert stays["class"] == "RankFailedError"
    assert (
        "has shut down (called tfdist.shutdown() or ended) after 3 training"
        in (stays["message"])
    )


def test_a_branch_on_the_rank():
    check(
        run_ranks(one, 2, "branch"),
        "rank 0 waits in tfdist.allreduce (test_deadlock.py:",
        ") for rank 1; rank 1 waits in tfdist.broadcast_object (test_deadlock.py:",
    )


@pytest.mark.slow
def test_a_function_that_was_traced_before_in_rank_zero_only():
    check(
        run_ranks(one, 2, "traced_before"),
        "inside RankZeroOnly(LambdaCallback).on_epoch_end, which only this rank runs,",
        "rank 1 waits in RankZeroOnly(LambdaCallback) at the end of epoch 1",
        "a tf.function (test_deadlock.py:",
    )


def test_two_functions_that_wait_for_each_other_have_a_twentieth_of_the_timeout():
    results = run_ranks(one, 2, "graphs", env={"TFDIST_TIMEOUT_S": "30"})
    check(
        results,
        "rank 0 waits in a tf.function (test_deadlock.py:",
        raised="FailedPreconditionError",  # outside of fit
    )
    assert min(own["seconds"] for own in results) > 1.0


def slow():
    """Nothing here is wrong: a rank is late, and two results come in another order."""
    if tfdist.rank() == 0:
        time.sleep(2.0)
    tfdist.allreduce(1.0)

    def late(value, rank):
        def wait():
            time.sleep(1.5 if tfdist.rank() == rank else 0.0)
            return value

        return tf.ensure_shape(tf.py_function(wait, [], tf.float32), [])

    @tf.function
    def crossed():
        first = tfdist.allreduce(late(1.0, 0), op=tfdist.ReduceOp.SUM, name="first")
        second = tfdist.allreduce(late(2.0, 1), op=tfdist.ReduceOp.SUM, name="second")
        return first + second

    return float(crossed())


def test_slow_ranks_are_waited_for():
    assert run_ranks(slow, 2) == [6.0] * 2
