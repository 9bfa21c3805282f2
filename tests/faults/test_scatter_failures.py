"""A reader, or a rank that is read for, ends or stops; strangers knock at a reader."""

import os
import random
import signal
import time

import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks
from helpers.strangers import KINDS, Attack, Job

import tfdist
from tfdist.core import runtime
from tfdist.core.rendezvous import auth

pytestmark = pytest.mark.faults
WAITS_S = 30.0


def two_then_wait(rank):
    """Two elements; for the third one a rank waits longer than the test lasts."""

    def wait(n):
        if n == 2 and tfdist.rank() == 0:
            time.sleep(WAITS_S)
        return n

    numbers = tf.data.Dataset.range(3)
    return numbers.map(lambda n: tf.py_function(wait, [n], tf.int64))


def end_of_the_reader(name):
    scattered = tfdist.data.scatter(two_then_wait)
    tfdist.barrier()
    if tfdist.rank() == 0:
        time.sleep(1.0)  # the others wait for an element by now
        os.kill(os.getpid(), getattr(signal, name))
    seen = []
    found = outcome(lambda: seen.extend(int(one) for one in scattered))
    return [found, seen]


@pytest.mark.parametrize(
    "name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)]
)
def test_who_waits_for_a_reader_that_is_killed_names_it_at_once(name):
    found = run_ranks(end_of_the_reader, 3, name, may_die=[0])
    assert found[0] == -getattr(signal, name)
    for one, seen in found[1:]:
        assert one["class"] == "RankFailedError", one
        assert one["record"]["rank"] == 0
        assert one["seconds"] < 10.0
        assert seen == [0, 1]


def endless(rank):
    return tf.data.Dataset.from_tensors(tf.zeros([1000])).repeat()


def end_of_one_that_is_read_for():
    scattered = tfdist.data.scatter(endless)
    iterator = iter(scattered)
    next(iterator)
    tfdist.barrier()
    if tfdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = outcome(lambda: tfdist.barrier())
    # Rank 0 still reads for rank 2, as long as that has not looked for a verdict.
    return failed["class"], len([next(iterator) for _ in range(20)])


@pytest.mark.slow
def test_the_end_of_one_rank_does_not_end_the_reading_for_others():
    found = run_ranks(end_of_one_that_is_read_for, 3, may_die=[1])
    assert found[0] == found[2] == ["RankFailedError", 20]


def with_strangers():
    scattered = tfdist.data.scatter(endless, buffer_bytes=20_000)
    iterator = iter(scattered)
    if tfdist.rank() == 0:
        service = runtime.state.resources["data/reading"]
        credentials, _ = runtime.credentials()
        job = Job(
            [tuple(service.listening["address"])],
            credentials.secret,
            credentials.job,
            b"x" * 99,
        )
        attack = Attack(job, seed=1)
        attack.run(100)
        claims(job)
        knocked = [sorted(attack.made), len(service._streams)]
        tfdist.barrier()
        return knocked
    total = 0
    for _ in range(700):
        total += int(tf.size(next(iterator)))
    tfdist.barrier()
    return total


def claims(job):
    """One that has the secret, but asks for what is not its own."""
    right = {
        "purpose": "read",
        "job": job.job,
        "generation": runtime.generation(),
        "transport": "tcp",
        "frames": "hmac-sha256 control",
        **{"from": 1, "to": 0, "dataset": 1, "iteration": 1},
    }
    wrong = [
        {"purpose": "link"},
        {"generation": 0},
        {"to": 1},
        {"from": 0},
        {"from": "1"},
        {"dataset": 2},
        {"dataset": None},
        {"iteration": -1},
        {"iteration": 1 << 60},
        {"frames": ""},
    ]
    for one in wrong:
        with pytest.raises(auth.RefusedError, match="rank 0 refused to read"):
            ask(job, right | one)
    ask(job, right)


def ask(job, claimed):
    import asyncio
    import socket

    from tfdist.core.rendezvous.channel import Channel

    async def go():
        channel = Channel(socket.create_connection(job.ports[0]))
        try:
            await channel.handshake_as_client(job.secret, claimed)
        finally:
            channel.close()

    asyncio.run(go())


@pytest.mark.slow
def test_strangers_at_a_reader_are_refused_and_do_no_harm():
    random.seed(1)
    found = run_ranks(with_strangers, 2)
    kinds, streams = found[0]
    assert set(kinds) == set(KINDS)
    assert streams <= 2  # of rank 1, and perhaps the one that has just hung up
    assert found[1] == 700 * 1000
