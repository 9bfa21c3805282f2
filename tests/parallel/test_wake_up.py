"""A rank whose engine sleeps begins with what it is given at once."""

import time

import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

PAUSE_S = 0.2  # longer than the engine looks for work before it sleeps
CALLS = 4


def answered_s():
    """How long each allreduce took after a pause, in seconds."""
    one = tf.constant(1.0)
    tfdist.allreduce(one, op=tfdist.ReduceOp.SUM)
    taken = []
    for _ in range(CALLS):
        time.sleep(PAUSE_S)
        begin = time.monotonic()
        tfdist.allreduce(one, op=tfdist.ReduceOp.SUM)
        taken.append(time.monotonic() - begin)
    return taken


def test_a_call_wakes_the_engine():
    # Without being woken the engine would look for work once in a heartbeat, so that
    # the ranks' calls would take a good part of one. The quickest call counts: the
    # others may have waited for the processor.
    env = {"TFDIST_HEARTBEAT_S": "2", "TFDIST_PEER_TIMEOUT_S": "20"}
    for taken in run_ranks(answered_s, 2, env=env):
        assert min(taken) < 0.1, taken
