"""Few ranks read for all: every rank gets what it would have read itself."""

import gc
import os
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist import _runtime
from tfdist.data._scatter import _NAME

END_S = 10.0


def read(rank):
    """Batches of a dict, shuffled anew in each epoch, the last one smaller."""
    numbers = np.arange(23)
    samples = {
        "x": numbers[:, None] * np.float32([1.0, 0.5]),
        "text": np.array([b"%d" % 7**n for n in numbers], object),
    }
    return tfdist.data.shard(
        samples, batch_size=3, shuffle=True, seed=5, rank=rank, size=tfdist.size()
    )


def elements(dataset):
    return [tf.nest.map_structure(lambda x: x.numpy(), one) for one in dataset]


def same(found, expected):
    """Structure, types, shapes and bits."""
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)


def equal(function, epochs=2, **options):
    """Checks that scatter gives this rank what `function` does."""
    scattered = tfdist.data.scatter(function, **options)
    own = function(tfdist.rank())
    assert scattered.element_spec == own.element_spec
    assert int(scattered.cardinality()) == int(own.cardinality())
    for _ in range(epochs):
        same(elements(scattered), elements(own))
    return scattered


def reads(number):
    """What is open here: threads of connections, by name."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        gc.collect()
        found = [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(("tfdist-reading-for", "tfdist-receiving"))
        ]
        if len(found) == number:
            break
        time.sleep(0.01)
    return found


# ---- equal to reading oneself ----


def every_number_of_readers():
    for readers in range(1, tfdist.size() + 1):
        equal(read, readers=readers)
    tfdist.barrier()  # a reader that leaves takes what it reads with it
    return reads(0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shuffled_batches_are_those_of_reading_oneself(size):
    assert run_ranks(every_number_of_readers, size) == [[]] * size


TYPES = (
    "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    " bool complex64 complex128"
).split()


def of_all_types(rank):
    numbers = tf.data.Dataset.range(rank, 9 + rank)
    return numbers.map(
        lambda n: tuple(tf.cast(tf.cast([n % 3], tf.float32), one) for one in TYPES)
    )


def pictures(rank):
    """Strings of very different lengths, some of them empty, and their labels."""
    rng = np.random.default_rng(rank)
    files = [rng.bytes(n) for n in (0, 1, 110_003, 70_000, 3_000_000, 0, 65_536)]
    named = {"jpeg": tf.constant(files), "name": [(b"a", b""), (b"", b"\0c")] * 3}
    named["name"] += [(b"d", b"e")]
    return tf.data.Dataset.from_tensor_slices((named, tf.range(len(files))))


def unknown_shapes(rank):
    """Lengths and ranks that differ, empty batches, a filter: nothing is known."""

    def rows(n):
        return np.full([n % 4, 2], n), np.arange(n % 3), np.zeros([1] * (n % 5))

    def call(n):
        types = (tf.int64, tf.int64, tf.float64)
        one, two, three = tf.numpy_function(rows, [n], types)
        return (
            tf.ensure_shape(one, [None, 2]),
            {"b": tf.ensure_shape(two, [None])},
            three,
        )

    return tf.data.Dataset.range(20 + rank).filter(lambda n: n % 7 > 0).map(call)


def large(rank):
    return tf.data.Dataset.range(5).map(lambda n: tf.fill([300, 1000], n + rank))


def endless(rank):
    return tf.data.Dataset.from_tensors(tf.constant(rank)).repeat()


def none(rank):
    return tf.data.Dataset.range(0)


def all_kinds():
    equal(of_all_types)
    equal(pictures)
    equal(unknown_shapes)
    equal(large, buffer_bytes=1)  # never more than one element ahead
    equal(none)
    scattered = tfdist.data.scatter(endless)
    assert int(scattered.cardinality()) == tf.data.INFINITE_CARDINALITY
    same(elements(scattered.take(3000)), [np.int32(tfdist.rank())] * 3000)
    tfdist.barrier()
    return True


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_kind_of_element_comes_as_it_was(transport):
    env = {"TFDIST_TRANSPORT": transport}
    assert run_ranks(all_kinds, 2, env=env) == [True] * 2


def one_dataset():
    samples = tf.data.Dataset.range(11).map(lambda n: n * n)
    scattered = tfdist.data.scatter(samples, readers=2)
    same(elements(scattered), elements(samples.shard(3, tfdist.rank())))
    shuffled = outcome(lambda: tfdist.data.scatter(samples.shuffle(4, seed=1)))
    tfdist.barrier()
    return shuffled


def test_a_dataset_is_dealt_out_by_position_and_must_not_be_shuffled():
    found = run_ranks(one_dataset, 3)
    assert found[0]["class"] == "ValueError"
    for one in found[1:]:
        assert one["class"] == "RankFailedError"
    for one in found:
        assert f"shuffled before {_NAME}" in one["message"]


# ---- iterators that are not read to the end, or at all ----


def iterators_of_all_kinds(dataset):
    """What each of them gives, in the order in which they are made."""
    found = [elements(dataset.take(2))]
    for one in dataset:
        found.append(tf.nest.map_structure(lambda x: x.numpy(), one))
        break
    never, late, first = iter(dataset), iter(dataset), iter(dataset)
    found.append(elements(first))
    found.append(elements(late))
    del never
    found.append(elements(dataset.repeat(2)))
    found.append(elements(tf.data.Dataset.zip(dataset, dataset)))
    found.append(int(dataset.reduce(np.int64(0), lambda n, one: n + 1)))
    found.append(elements(dataset))
    return found


def broken_off():
    scattered = tfdist.data.scatter(read)
    same(iterators_of_all_kinds(scattered), iterators_of_all_kinds(read(tfdist.rank())))
    begun = [iter(scattered) for _ in range(3)]
    for iterator in begun:
        next(iterator)
    tfdist.barrier()
    connections = len(reads(3))
    tfdist.barrier()
    del begun, iterator
    left = reads(0)
    tfdist.barrier()
    return [connections, left]


def test_every_iterator_gives_what_it_would_give_where_one_reads_oneself():
    found = run_ranks(broken_off, 2)
    assert found == [[3, []]] * 2


def stalls(rank):
    """Two elements, then none for a long time."""
    numbers = tf.data.Dataset.range(3)

    def wait(n):
        if n == 2:
            time.sleep(4.0)
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
        assert reads(0) == []
    tfdist.barrier()
    return seconds


def test_an_iterator_that_waits_is_thrown_away_at_once():
    assert max(run_ranks(thrown_away_while_it_waits, 2)) < 2.0


def train(scattered):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", jit_compile=False)

    def pairs(rank):
        return read(rank).map(lambda one: (one["x"] / 23, one["x"][:, :1]))

    data = tfdist.data.scatter(pairs) if scattered else pairs(tfdist.rank())
    history = model.fit(
        data,
        epochs=3,
        steps_per_epoch=2,
        validation_data=data,
        verbose=0,
        callbacks=[tfdist.callbacks.BroadcastInitialState()],
    )
    return [history.history["loss"], *(v.numpy() for v in model.weights)]


def trained_both_ways():
    same(train(True), train(False))
    tfdist.barrier()
    return True


def test_fit_with_fewer_steps_than_data_learns_the_same():
    assert run_ranks(trained_both_ways, 2) == [True] * 2


# ---- errors ----


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
        assert "readers of 1 to 3" in words[0] and "got 0" in words[0]
        assert "got 4" in words[1]
        assert "readers is 1 on rank 0, 2 on rank 1" in words[3]
        assert "got list" in words[5]
        assert "from dataset(0), got int" in words[6]
        assert "element['a']" in words[7] and ".to_tensor()" in words[7]
        assert "dataset is a tf.data.Dataset on rank 0, a function" in words[8]


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
    assert "rank 0, which reads for rank 1, got an error from its dataset" in message
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
    before = descriptors()
    tfdist.init()
    scattered = tfdist.data.scatter(read)
    iterator = iter(scattered)
    next(iterator)
    tfdist.barrier()
    tfdist.shutdown()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("tfdist-")]
    left = [descriptors() - before, threads]
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
    assert "call scatter again after tfdist.init()" in found[1][1]


def forked():
    scattered = tfdist.data.scatter(read)
    iterator = iter(scattered)
    first = next(iterator)
    tfdist.barrier()
    child = os.fork()
    if child == 0:
        helpers = _runtime._state.helpers.values()
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
