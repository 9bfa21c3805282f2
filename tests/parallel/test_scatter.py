"""Few ranks read for all: every rank gets what it would have read itself."""

import gc
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks
from helpers.scattered import elements, equal, open_threads, read, same

import tfdist
from tfdist.core import runtime

# ---- equal to reading oneself ----


def shuffled_batches(readers):
    equal(read, readers=readers)
    tfdist.barrier()  # a reader that leaves takes what it reads with it
    return open_threads(0)


@pytest.mark.parametrize(
    ("size", "readers"),
    [
        *[(2, 1), (3, 2), (4, 3)],
        *[pytest.param(*c, marks=pytest.mark.slow) for c in ((2, 2), (3, 1), (3, 3))],
        *[pytest.param(*c, marks=pytest.mark.slow) for c in ((4, 1), (4, 2), (4, 4))],
    ],
)
def test_shuffled_batches_are_those_of_reading_oneself(size, readers):
    assert run_ranks(shuffled_batches, size, readers) == [[]] * size


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


@pytest.mark.parametrize(
    "transport", [pytest.param("auto", marks=pytest.mark.slow), "tcp"]
)
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


def dealt_out_again():
    numbers = np.arange(12)
    whole = tf.data.Dataset.from_tensor_slices(numbers)
    one_part = tfdist.data.scatter(whole)
    by_function = tfdist.data.scatter(
        lambda rank: tfdist.data.shard(numbers, batch_size=2, rank=rank).unbatch()
    )
    found = [
        outcome(lambda part=part: tfdist.data.shard(part, batch_size=2))
        for part in (one_part, by_function.map(lambda n: n + 1))
    ]
    tfdist.barrier()
    same_for_all = tfdist.data.scatter(lambda _: whole)
    deal = tfdist.data.shard(same_for_all, batch_size=12).unbatch()
    own = [int(n) for n in deal]
    tfdist.barrier()
    return found, own


def test_a_part_is_not_dealt_out_again_on_any_rank():
    results = run_ranks(dealt_out_again, 2)
    for found, _ in results:
        for one in found:
            assert one["class"] == "ValueError"
            assert "already distributed to 2 ranks before" in one["message"]
    assert [own for _, own in results] == [[*range(0, 12, 2)], [*range(1, 12, 2)]]


def test_a_dataset_is_dealt_out_by_position_and_must_not_be_shuffled():
    found = run_ranks(one_dataset, 3)
    assert found[0]["class"] == "ValueError"
    for one in found[1:]:
        assert one["class"] == "RankFailedError"
    for one in found:
        assert "shuffled before tfdist.data.scatter" in one["message"]


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
    tf.random.set_seed(1)
    scattered = tfdist.data.scatter(read)
    same(iterators_of_all_kinds(scattered), iterators_of_all_kinds(read(tfdist.rank())))
    forever = tfdist.data.scatter(endless, buffer_bytes=1000)
    begun = [iter(forever) for _ in range(3)]
    for iterator in begun:
        next(iterator)
    tfdist.barrier()
    connections = len(open_threads(3))
    tfdist.barrier()
    del begun, iterator
    left = open_threads(0)
    tfdist.barrier()
    return [connections, left]


def test_every_iterator_gives_what_it_would_give_where_one_reads_oneself():
    found = run_ranks(broken_off, 2)
    assert found == [[3, []]] * 2


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
        epochs=2,
        steps_per_epoch=2,
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


READ = {"elements": 0}


def counted(rank):
    """Elements of 100 kB without an end; counts those that are read for rank 1."""

    def count(n):
        READ["elements"] += rank == 1
        return np.full(100_000, n % 100, np.uint8)

    numbers = tf.data.Dataset.counter()
    return numbers.map(
        lambda n: tf.ensure_shape(tf.numpy_function(count, [n], tf.uint8), [100_000])
    )


def ahead_of_need():
    READ["elements"] = 0
    iterator = iter(tfdist.data.scatter(counted, buffer_bytes=1_000_000))
    if tfdist.rank() == 1:
        next(iterator)
        time.sleep(1.0)
    tfdist.barrier()
    return READ["elements"]


def test_a_reader_reads_ahead_no_more_than_asked_for():
    read_for_1, _ = run_ranks(ahead_of_need, 2)
    # The buffer of 10, which a block may exceed; blocks of 11 that wait for room, are
    # being sent, or are being taken; 42 that TensorFlow holds ready; some in between.
    assert 10 < read_for_1 <= 10 + 4 * 11 + 42 + 20


def one_for_each_epoch():
    """Numbers of datasets that the reader keeps, after each call of `scatter`."""
    kept, seen = [], []
    used = tfdist.data.scatter(lambda rank: tf.data.Dataset.range(rank, 9)).repeat(2)
    for epoch in range(4):
        scattered = tfdist.data.scatter(
            lambda rank, epoch=epoch: tf.data.Dataset.range(rank, rank + epoch + 1)
        ).map(lambda n: n + 1)
        seen.append([int(n) for n in scattered])
        never = iter(scattered)
        del scattered, never
        gc.collect()
        if tfdist.rank() == 0:
            kept.append(len(runtime.state.resources["data/reading"]._shares))
    assert [int(n) for n in used] == [*range(tfdist.rank(), 9)] * 2
    tfdist.barrier()
    return kept, seen


def test_a_reader_drops_the_datasets_that_their_ranks_have_dropped():
    results = run_ranks(one_for_each_epoch, 3)
    assert results[0][0] == [4, 4, 4, 4]
    for rank, (_, seen) in enumerate(results):
        assert seen == [[rank + 1 + i for i in range(n + 1)] for n in range(4)]
