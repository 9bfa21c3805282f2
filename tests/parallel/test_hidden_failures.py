"""Allreduces that hide the loss of a rank, as operations of TensorFlow."""

import os
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.core_client import hiding
from helpers.deadline import deadline
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import ReduceOp
from tfdist.core import native


def steps_of_a_survivor():
    """Gradients of rank 0 of two: averaged, own ones, and an error."""
    variables = [tf.Variable(tf.ones([n])) for n in (3, 5000, 300_000)]

    @tf.function
    def step(x):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(x * v * v) for v in variables])
        return tape.gradient(loss, variables)

    def values():
        gradients = step(tf.constant(tfdist.rank() + 1.0))
        return [np.unique(gradient).tolist() for gradient in gradients]

    found = {"averaged": values()}
    tfdist.barrier()
    if tfdist.rank() == 1:
        time.sleep(0.3)  # rank 0 waits by then
        os.kill(os.getpid(), signal.SIGKILL)
    with hiding(True):
        found["pending"] = values()
        found["hidden"] = native.take_hidden() > 0
        found["later"] = values()
        found["eager"] = tfdist.allreduce(tf.constant([5.0])).numpy().tolist()
        found["hidden later"] = native.take_hidden() > 1
        found["allgather"] = outcome(lambda: tfdist.allgather(tf.ones([1])))["class"]
        found["not counted"] = native.take_hidden()
    found["off"] = outcome(values)["class"]
    found["failure"] = native.failure().payload["rank"]
    return found


@pytest.mark.faults
@deadline(120)
def test_own_gradients_come_back_from_a_function():
    survivor, killed = run_ranks(steps_of_a_survivor, 2, may_die=[1])
    assert killed == -signal.SIGKILL
    assert survivor == {
        "averaged": [[3.0]] * 3,
        "pending": [[2.0]] * 3,
        "hidden": True,
        "later": [[2.0]] * 3,
        "eager": [5.0],
        "hidden later": True,
        "allgather": "RankFailedError",
        "not counted": 0,
        "off": "RankFailedError",
        "failure": 1,
    }


def mismatch():
    with hiding(True):
        x = tf.ones([2 + tfdist.rank()])
        different = outcome(lambda: tfdist.allreduce(x, name="x"))["class"]
        total = tfdist.allreduce(tf.ones([2]), name="y", op=ReduceOp.SUM)
        return [different, total.numpy().tolist(), native.take_hidden()]


@deadline(120)
def test_a_mismatch_is_not_hidden():
    assert run_ranks(mismatch, 2) == [["MismatchError", [2.0, 2.0], 0]] * 2
