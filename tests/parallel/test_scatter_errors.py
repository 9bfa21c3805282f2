"""tfdist.data.scatter: wrong calls, data that fail or do not come, what stays open."""

import gc
import os
import threading
import time

import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks
from helpers.scattered import elements, equal, open_threads, read, same

import tfdist
from tfdist.core import runtime


def stalls(rank):
    """Two elements, then none for a long time."""
    numbers = tf.data.Dataset.range(3)

    def wait(n):
        if n == 2:
            time.sleep(2.5)
        return n

    return numbers.map(lambda n: tf.py_function(wait, [n], tf.int64))


def thrown_away_while_it_waits():
    scattered = tfdist.data.scatter(stalls)
    seconds = 0.0
    if tfdist.rank() == 1:
        iterator = iter(scattered)
        assert [int(next(iterator)) for _ in range(2)] == [0, 1]
        time.sleep(0.5)  # TensorFlow waits for the third one
        begin_s = time.monotonic()
        del iterator
        gc.collect()
        seconds = time.monotonic() - begin_s
        assert open_threads(0) == []
    tfdist.barrier()
    return seconds


def test_an_iterator_that_waits_is_thrown_away_at_once():
    assert max(run_ranks(thrown_away_while_it_waits, 2)) < 1.5


def wrong_calls():
    size, rank = tfdist.size(), tfdist.rank()
    scatter = tfdist.data.scatter
    ragged = tf.data.Dataset.from_tensors({"a": tf.ragged.constant([[1], [2, 3]])})
    calls = [
        lambda: scatter(read, readers=0),
        lambda: scatter(read, readers=size + 1),
        lambda: scatter(read, readers=1.0),
        lambda: scatter(read, readers=1 + rank % 2),
        lambda: scatter(read, buffer_bytes=0),
        lambda: scatter([1, 2]),
        lambda: scatter(lambda rank: 5),
        lambda: scatter(lambda rank: ragged),
        lambda: scatter(read if rank else read(0)),
    ]
    return [outcome(call) for call in calls]


def test_wrong_arguments_are_an_error_on_every_rank():
    found = run_ranks(wrong_calls, 3)
    first = ["ValueError"] * 3 + ["MismatchError", "ValueError"] + ["TypeError"] * 3
    assert [one["class"] for one in found[0]] == [*first, "MismatchError"]
    others = [*first[:6], "RankFailedError", "RankFailedError", "MismatchError"]
    for rank in (1, 2):
        assert [one["class"] for one in found[rank]] == others
    for one in found:
        words = [one[n]["message"] for n in range(9)]
        assert "readers to be from 1 to 3" in words[0] and "got 0" in words[0]
        assert "got 4" in words[1]
        assert "readers is 1 on rank 0 and 2 on rank 1" in words[3]
        assert "got list" in words[5]
        assert "from dataset(0), got int" in words[6]
        assert "element['a']" in words[7] and ".to_tensor()" in words[7]
        assert "dataset is a tf.data.Dataset on rank 0 and a function" in words[8]


def corrupt(rank):
    """Rank 1's fifth element is corrupt."""

    def check(n):
        if rank == 1 and n == 4:
            raise ValueError("record 4 of shard-00001 is corrupt")
        return n

    return tf.data.Dataset.range(8).map(
        lambda n: tf.ensure_shape(tf.py_function(check, [n], tf.int64), [])
    )


def read_what_is_corrupt():
    scattered = tfdist.data.scatter(corrupt)
    seen = []
    found = outcome(lambda: seen.extend(int(one) for one in scattered))
    tfdist.barrier()
    return [found["class"], found.get("message", ""), seen]


def test_an_error_of_the_data_is_raised_where_they_were_to_go():
    found = run_ranks(read_what_is_corrupt, 3)
    for rank in (0, 2):
        assert found[rank] == ["none", "", list(range(8))]
    _, message, seen = found[1]
    assert "rank 0, which reads for rank 1, got an error while reading" in message
    assert "record 4 of shard-00001 is corrupt" in message
    assert seen == [0, 1, 2, 3]


def hang():
    scattered = tfdist.data.scatter(stalls)
    found = {"class": "none"}
    if tfdist.rank() == 1:
        found = outcome(lambda: elements(scattered))
    tfdist.barrier(timeout_s=20.0)
    return found


def test_a_reader_whose_data_do_not_come_is_a_timeout():
    found = run_ranks(hang, 2, env={"TFDIST_TIMEOUT_S": "1.0"})
    assert found[1]["class"] == "TimeoutError"
    assert found[1]["record"]["rank"] == 0
    assert "sent no element within 1 s (TFDIST_TIMEOUT_S)" in found[1]["message"]
    assert found[1]["seconds"] < 4.0


def descriptors():
    names = os.listdir("/proc/self/fd")
    links = (_link(f"/proc/self/fd/{name}") for name in names)
    return sum(link.startswith("socket:") for link in links)


def _link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


def open_at_the_end():
    gc.collect()
    before = descriptors()
    tfdist.init()
    scattered = tfdist.data.scatter(read)
    iterator = iter(scattered)
    next(iterator)
    tfdist.barrier()
    tfdist.shutdown()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("tfdist-")]
    left = [max(0, descriptors() - before), threads]
    tfdist.init()
    found = outcome(lambda: elements(scattered))
    equal(read)
    tfdist.barrier()
    tfdist.shutdown()
    del iterator
    return [left, found.get("message", "")]


def test_shutdown_closes_everything_and_another_init_begins_anew():
    found = run_ranks(open_at_the_end, 2, init=False)
    assert [left for left, _ in found] == [[0, []]] * 2
    assert "call scatter again on all ranks after tfdist.init()" in found[1][1]


def forked():
    scattered = tfdist.data.scatter(read)
    iterator = iter(scattered)
    first = next(iterator)
    tfdist.barrier()
    child = os.fork()
    if child == 0:
        helpers = runtime.state.resources.values()
        for one in helpers:
            one.close()  # what an atexit hook might do; ends nothing of the parent's
        os._exit(descriptors() > 3)
    _, status = os.waitpid(child, 0)
    rest = elements(iterator)
    own = elements(read(tfdist.rank()))
    same([tf.nest.map_structure(lambda x: x.numpy(), first), *rest], own)
    tfdist.barrier()
    return status


def test_a_fork_takes_nothing_along():
    assert run_ranks(forked, 2) == [0, 0]
