"""A rank whose engine sleeps begins with what it is given at once."""

import statistics
import time

from helpers.ranks import run_ranks

import tfdist

PAUSE_S = 0.2  # longer than the engine looks for work before it sleeps
CALLS = 7


def answered_s():
    """How long each new process set took after a pause, in seconds.

    The thread that calls an allreduce of TensorFlow's does the engine's work itself,
    but for a process set it waits.
    """
    tfdist.init()
    taken = []
    for _ in range(CALLS):
        time.sleep(PAUSE_S)
        begin = time.monotonic()
        added = tfdist.add_process_set([0, 1])
        taken.append(time.monotonic() - begin)
        tfdist.remove_process_set(added)
    return taken


def test_a_call_wakes_the_engine():
    # Without being woken the engine would look for work once in a heartbeat, so that
    # the ranks' calls would take a good part of one. Most calls have to be quick: some
    # may wait for the processor, and some may come when the engine is awake anyway.
    env = {"TFDIST_HEARTBEAT_S": "2", "TFDIST_PEER_TIMEOUT_S": "20"}
    for taken in run_ranks(answered_s, 2, env=env):
        assert statistics.median(taken) < 0.5, taken
