"""A rank's share of the data: disjoint, complete, and equal in steps."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorflow.python.eager import context

from tfdist import data
from tfdist.data import _dataset_checks


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 100))
@example(5, 4, 1)
@example(9, 2, 2)
def test_batch_sizes_cover_the_data_in_equal_steps(total, size, batch_size):
    if total < size:
        with pytest.raises(ValueError, match=f"{total} samples"):
            data.batch_sizes(total, batch_size=batch_size, rank=0, size=size)
        return
    ranks = [
        data.batch_sizes(total, batch_size=batch_size, rank=r, size=size)
        for r in range(size)
    ]
    assert len({len(sizes) for sizes in ranks}) == 1
    assert sum(map(sum, ranks)) == total
    assert {sum(sizes) for sizes in ranks} <= {total // size, total // size + 1}
    for step in zip(*ranks, strict=True):
        assert min(step) >= 1
        assert max(step) - min(step) <= 1
        assert max(step) <= batch_size + (batch_size == 1)


@pytest.mark.parametrize(
    "total, words",
    [(0, "Check the data"), (1, "Start one rank,"), (2, "Start at most 2 ranks,")],
)
def test_too_few_samples_say_how_many_ranks_to_start(total, words):
    with pytest.raises(ValueError, match=words):
        data.batch_sizes(total, batch_size=1, rank=0, size=3)


def epoch(batches):
    return [batch.tolist() for batch in batches.as_numpy_iterator()]


@settings(max_examples=10)
@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
@example(5, 4, 1, True, True)
@example(9, 2, 2, True, False)
def test_three_epochs_of_disjoint_shards_whose_union_is_the_data(
    total, size, batch_size, shuffle, from_dataset
):
    total = max(total, size)
    source = tf.data.Dataset.range(total) if from_dataset else np.arange(total)
    shards = [
        data.shard(source, batch_size=batch_size, shuffle=shuffle, rank=r, size=size)
        for r in range(size)
    ]
    steps = {int(s.cardinality()) for s in shards}
    for _ in range(3):
        batches = [epoch(s) for s in shards]
        assert {len(b) for b in batches} == steps
        seen = [sample for b in batches for batch in b for sample in batch]
        assert sorted(seen) == list(range(total))


def test_shuffle_differs_between_epochs_and_repeats_between_runs():
    def orders():
        shard = data.shard(
            np.arange(64), batch_size=64, shuffle=True, seed=5, rank=0, size=1
        )
        return [epoch(shard) for _ in range(2)]

    first = orders()
    assert first[0] != first[1]
    assert first == orders()


def test_map_fn_sees_this_ranks_samples_only():
    seen = []

    def note(x, y):
        tf.numpy_function(lambda i: seen.append(int(i)), [x], [])
        return x * 10, y

    arrays = (np.arange(6), np.arange(6.0))
    shard = data.shard(arrays, batch_size=2, map_fn=note, rank=1, size=2)
    assert [x.tolist() for x, _ in shard.as_numpy_iterator()] == [[10, 30], [50]]
    assert sorted(seen) == [1, 3, 5]


def test_structures_of_arrays_keep_their_structure():
    arrays = ({"a": np.arange(4), "b": np.arange(8).reshape(4, 2)}, np.arange(4.0))
    shard = data.shard(arrays, batch_size=9, rank=1, size=2)
    [(x, y)] = list(shard.as_numpy_iterator())
    assert x["a"].tolist() == [1, 3]
    assert x["b"].tolist() == [[2, 3], [6, 7]]
    assert y.tolist() == [1.0, 3.0]


class Labelled:
    """As a Series of pandas with a float index: a slice in brackets has labels."""

    def __init__(self, values):
        self.iloc, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, labels):
        return self.iloc[:0]


def test_rows_of_tables_are_taken_by_their_places():
    column = Labelled(np.arange(8))
    for rank in range(2):
        shard = data.shard((column, np.arange(8)), batch_size=8, rank=rank, size=2)
        [(x, y)] = list(shard.as_numpy_iterator())
        assert x.tolist() == y.tolist() == [*range(8)][rank::2]


def plain(part):
    """A batch as lists."""
    if isinstance(part, tf.SparseTensor):
        part = tf.sparse.to_dense(part)
    return (
        part.to_list() if isinstance(part, tf.RaggedTensor) else part.numpy().tolist()
    )


sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 0], [5, 6]])


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        (sparse, "got SparseTensor."),
        ((sparse, np.arange(5)), "got SparseTensor in a tuple."),
        ({"x": sparse, "y": np.arange(5)}, "got SparseTensor in a dict."),
        ((np.arange(5), None), "got NoneType in a tuple."),
        (iter([1]), "got list_iterator."),
        (tf.IndexedSlices(tf.ones([5, 1]), tf.range(5), [5, 1]), "got IndexedSlices."),
    ],
)
def test_what_has_no_rows_to_take_is_refused(arrays, found):
    with pytest.raises(TypeError) as refusal:
        data.shard(arrays, batch_size=2, rank=0, size=2)
    assert found in str(refusal.value)
    assert ("Dataset.from_tensor_slices" in str(refusal.value)) == ("Sparse" in found)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_sparse_rows_are_dealt_out_as_their_refusal_says(batch_size):
    rows = tf.sparse.to_dense(sparse).numpy().tolist()
    dataset = tf.data.Dataset.from_tensor_slices((sparse, np.arange(5)))
    for rank in range(2):
        part = list(data.shard(dataset, batch_size=batch_size, rank=rank, size=2))
        assert sum((plain(x) for x, _ in part), []) == rows[rank::2]
        assert sum((plain(y) for _, y in part), []) == [*range(5)][rank::2]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("rows", [[[1], [2, 3], [], [4, 5, 6], [7]], [[[1], [2]]] * 5])
def test_ragged_rows_stay_ragged(rows, batch_size):
    ragged = tf.ragged.constant(rows)
    slices = tf.data.Dataset.from_tensor_slices((ragged, np.arange(5)))
    for rank in range(2):
        for samples in ((ragged, np.arange(5)), slices):
            part = list(data.shard(samples, batch_size=batch_size, rank=rank, size=2))
            assert all(isinstance(x, tf.RaggedTensor) for x, _ in part)
            assert sum((plain(x) for x, _ in part), []) == rows[rank::2]


ten = tf.data.Dataset.range(10)


def shuffled(batch):
    return tf.data.Dataset.from_tensor_slices(batch).shuffle(5, seed=1)


def mixed(**options):
    return tf.data.Dataset.sample_from_datasets([ten, ten], [0.5, 0.5], **options)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (ten.shuffle(10), "tfdist.data.shard"),
        (ten.shuffle(10).map(lambda x: x + 1).cache(), "tfdist.data.shard"),
        (tf.data.Dataset.zip((ten, ten.shuffle(3))), "tfdist.data.shard"),
        (ten.shuffle(10).batch(2), "tfdist.data.shard"),
        (ten.shard(2, 0), r"Remove .shard\(2, ...\)"),
        (ten.shard(2, 1).map(lambda x: x + 1).prefetch(1), r"Remove .shard\(2, ...\)"),
        (ten.batch(2), "batch_size="),
        (ten.padded_batch(2).prefetch(1), "batch_size="),
        (ten.repeat(), "repeat"),
        (ten.filter(lambda x: x > 3), "assert_cardinality"),
        (
            ten.map(lambda x: x * 2, num_parallel_calls=2, deterministic=False),
            "deterministic=True",
        ),
        (ten.batch(5).flat_map(shuffled), "shuffle=True"),
        (ten.batch(5).interleave(shuffled), "shuffle=True"),
        (ten.map(lambda x: shuffled(x[None]).get_single_element()), "shuffle=True"),
        (mixed(), "choose_from_datasets"),
        (mixed().map(lambda x: x + 1), "choose_from_datasets"),
        (data.shard(np.arange(10), batch_size=2, rank=0, size=2), "distributed to 2"),
        (
            data.shard(np.arange(10), batch_size=2, rank=0, size=2).unbatch(),
            "already distributed to 2 ranks before tfdist.data.shard",
        ),
    ],
)
def test_datasets_that_cannot_be_dealt_out_are_refused(dataset, words):
    with pytest.raises(ValueError, match=words):
        data.shard(dataset, batch_size=2, rank=0, size=2)


def counted(dataset, count):
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def test_datasets_in_the_same_order_on_all_ranks_are_dealt_out():
    read = ten.batch(2).interleave(tf.data.Dataset.from_tensor_slices, cycle_length=2)
    shards = [
        data.shard(counted(read, 10), batch_size=2, rank=rank, size=2)
        for rank in range(2)
    ]
    assert sorted(sum(epoch(shards[0]) + epoch(shards[1]), [])) == list(range(10))
    tf.random.set_seed(None)  # other tests may have set it
    drawn = data.shard(counted(mixed(seed=3), 20), batch_size=2, rank=0, size=1)
    assert sorted(sum(epoch(drawn), [])) == sorted([*range(10)] * 2)
    with pytest.raises(
        ValueError, match="uses sample_from_datasets before tfdist.data.scatter"
    ):
        anew = mixed(seed=3, rerandomize_each_iteration=True)
        _dataset_checks.check_order(anew, "tfdist.data.scatter", 2)
    _dataset_checks.check_order(mixed(seed=3), "tfdist.data.scatter", 2)


@pytest.fixture
def global_seed():
    """Sets TensorFlow's global seed until the end of the test."""
    yield tf.random.set_seed
    tf.random.set_seed(None)


def test_a_random_choice_that_depends_on_the_global_seed_is_refused(global_seed):
    global_seed(None)
    early = counted(mixed(seed=3), 20)
    global_seed(data.seed(7, rank=1))
    shards = [data.shard(early, batch_size=9, rank=r, size=2) for r in range(2)]
    assert sorted(sum(sum(map(epoch, shards), []), [])) == sorted([*range(10)] * 2)
    for options in ({"seed": 3}, {}):
        late = counted(mixed(**options), 20)
        for function in ("tfdist.data.shard", "tfdist.evaluate", "tfdist.predict"):
            with pytest.raises(
                ValueError, match=r"seed, before\s+keras.utils.set_rand"
            ):
                _dataset_checks.check_order(late.batch(2), function, 2)
            _dataset_checks.check_order(late, function, 1)
        _dataset_checks.check_order(late, "tfdist.data.scatter", 2)


class Recorded:
    """An array that records the device on which TensorFlow converts it."""

    def __init__(self, values, devices):
        self._values, self._devices = values, devices
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, rows):
        return Recorded(self._values[rows], self._devices)

    def __array__(self, *_, **__):
        self._devices.append(context.context().device_name)
        return self._values


def test_arrays_stay_out_of_the_memory_of_a_gpu():
    devices = []
    recorded = Recorded(np.arange(8), devices)
    batches = data.shard(recorded, batch_size=8, rank=0, size=1)
    assert epoch(batches) == [[*range(8)]]
    assert len(data.global_batches(recorded, global_batch=4)) == 2
    kinds = [tf.DeviceSpec.from_string(name or "").device_type for name in devices]
    assert len(kinds) >= 2 and set(kinds) == {"CPU"}


def test_one_rank_deals_out_again_what_it_has_whole():
    whole = data.shard(np.arange(4), batch_size=2, rank=0, size=1).unbatch()
    assert epoch(data.shard(counted(whole, 4), batch_size=2, rank=0, size=1)) == [
        [0, 1],
        [2, 3],
    ]


def test_a_flag_of_numpy_shuffles():
    shards = [
        data.shard(np.arange(64), batch_size=64, shuffle=flag, rank=0, size=1)
        for flag in (np.True_, True, np.False_)
    ]
    assert epoch(shards[0]) == epoch(shards[1]) != epoch(shards[2]) == [list(range(64))]


def test_a_part_of_the_data_that_is_not_the_ranks_may_be_dealt_out():
    shard = data.shard(ten.shard(5, 0), batch_size=2, rank=1, size=2)
    assert epoch(shard) == [[5]]
    shard = data.shard(ten.shard(1, 0), batch_size=5, rank=0, size=1)
    assert epoch(shard) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_message_about_a_shuffle_holds_the_two_lines_to_write():
    with pytest.raises(ValueError) as refusal:
        data.shard(ten.shuffle(3), batch_size=2, rank=0, size=2)
    first, second = str(refusal.value).splitlines()[1:]
    assert first.strip() == "dataset = ...  # without .shuffle()"
    namespace = {"dataset": ten, "tfdist": tf}
    line = second.strip().replace("...", "2").replace("tfdist.data.shard", "shard")
    namespace["shard"] = lambda *a, **k: data.shard(*a, **k, rank=0, size=2)
    exec(line, namespace)
    assert int(namespace["dataset"].cardinality()) == 3


def test_unordered_option_is_refused():
    options = tf.data.Options()
    options.deterministic = False
    with pytest.raises(ValueError, match="deterministic"):
        data.shard(ten.with_options(options), batch_size=1, rank=0, size=1)


def test_unbatched_again_is_accepted_with_a_known_number():
    dataset = ten.batch(3).unbatch().apply(tf.data.experimental.assert_cardinality(10))
    shard = data.shard(dataset, batch_size=5, rank=0, size=1)
    assert epoch(shard) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"data": [1, 2, 3], "batch_size": 1}, TypeError, "arrays"),
        (
            {"data": [np.zeros(4), np.ones(4)], "batch_size": 1},
            TypeError,
            r"got a list.* Write \(a, b\)",
        ),
        (
            {"data": ({"a": [np.zeros(4), np.ones(4)]}, np.ones(4)), "batch_size": 1},
            TypeError,
            "got a list",
        ),
        (
            {"data": (np.zeros(3), np.zeros(4)), "batch_size": 1},
            ValueError,
            r"\[3, 4\]",
        ),
        ({"data": np.zeros(3), "batch_size": 0}, ValueError, "batch_size"),
        ({"data": np.zeros(3), "batch_size": 1, "rank": 2}, ValueError, "rank"),
        ({"data": np.zeros(1), "batch_size": 1}, ValueError, "1 samples"),
        (
            {"data": np.zeros(3), "batch_size": 2.5},
            TypeError,
            "batch_size to be an int",
        ),
        (
            {"data": np.zeros(3), "batch_size": True},
            TypeError,
            "batch_size to be an int",
        ),
        ({"data": np.zeros(3), "batch_size": 1, "rank": 0.5}, TypeError, "rank"),
        ({"data": np.zeros(3), "batch_size": 1, "shuffle": -3}, ValueError, "shuffle"),
        ({"data": np.zeros(3), "batch_size": 1, "shuffle": 2.5}, TypeError, "shuffle"),
        ({"data": np.zeros(3), "batch_size": 1, "seed": -1}, ValueError, "seed"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        data.shard(**{"rank": 0, "size": 2, **arguments})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rank": 5}, ValueError),
        ({"rank": -1}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2.5}, TypeError),
        ({"size": 0}, ValueError),
        ({"total": -3}, ValueError),
    ],
)
def test_sizes_of_batches_that_cannot_be_are_refused(wrong, error):
    right = {"total": 10, "batch_size": 4, "rank": 0, "size": 2}
    [name] = wrong
    with pytest.raises(error, match=f"Expected {name}"):
        data.batch_sizes(**{**right, **wrong})


@pytest.mark.parametrize("wrong", [{"rank": -1}, {"rank": 1.5}, {"base": 1.5}])
def test_seeds_of_what_is_no_rank_or_base_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="Expected"):
        data.seed(**{"base": 1, "rank": 0, **wrong})


@given(st.integers(0, 2**40))
def test_seeds_are_distinct_reproducible_and_fit_keras(base):
    seeds = [data.seed(base, rank=r) for r in range(64)]
    assert len(set(seeds)) == 64
    assert seeds == [data.seed(base, rank=r) for r in range(64)]
    assert 0 <= min(seeds) <= max(seeds) < 2**31


def test_seeds_of_different_bases_differ():
    assert len({data.seed(base, rank=0) for base in range(1000)}) == 1000


def test_negative_base_is_refused():
    with pytest.raises(ValueError, match="Expected base to be in 0"):
        data.seed(-1, rank=0)
