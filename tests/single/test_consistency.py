"""The pure parts of the comparison of ranks: causes, moments, samples in common."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.consistency.explanation import (
    SLOT,
    STATE,
    TRAINED,
    RankState,
    explain,
    text_of,
)
from tfdist.collectives.consistency.fingerprint import (
    fingerprint,
    fingerprints,
    fingerprints_in_graph,
)
from tfdist.collectives.consistency.in_step import _is_due_in_graph, is_due
from tfdist.collectives.consistency.shared_samples import (
    SampleTap,
    can_hash_samples,
    common_samples,
    have_shared_samples,
    samples_per_rank,
)

NAMES = ["dense/kernel", "dense/bias", "norm/seen", "adam/kernel_momentum"]
KINDS = [TRAINED, TRAINED, STATE, SLOT]


def states(*different, sent=True):
    """Of ranks 0 and 1, whose variables at these places differ."""
    own = [[0, 0, 0, 0], [int(place in different) for place in range(4)]]
    return [RankState(r, NAMES, KINDS, own[r], were_broadcast=sent) for r in range(2)]


@pytest.mark.parametrize(
    ("different", "sent", "is_first", "words"),
    [
        ((0, 1, 3), False, True, ["'dense/kernel'", "BroadcastInitialState"]),
        ((0, 2), False, True, ["'dense/kernel'", "BroadcastInitialState"]),
        ((0, 1, 2, 3), True, True, ["'norm/seen'", "each rank's own batches"]),
        ((1,), True, True, ["'dense/bias'", "layer 'dense'", "first batch"]),
        ((3,), True, False, ["'adam/kernel_momentum'", "optimizer.variables"]),
        ((0, 1, 3), False, False, ["'dense/kernel'", "callback or the training step"]),
    ],
)
def test_the_message_names_the_variable_and_the_likely_cause(
    different, sent, is_first, words
):
    text = explain(states(*different, sent=sent), "after", is_first=is_first)
    assert "different values on rank 0 and rank 1" in text
    for word in words:
        assert word in text


def test_lists_of_variables_that_differ_are_named():
    other = RankState(1, ["dense_1/kernel", *NAMES[1:]], KINDS, [0] * 4)
    assert "'dense_1/kernel' on rank 1" in explain(
        [states()[0], other], "after", is_first=True
    )
    fewer = RankState(1, NAMES[:2], KINDS[:2], [0] * 2)
    assert "4 variables on rank 0 and 2 on rank 1" in explain(
        [states()[0], fewer], "after", is_first=True
    )


def test_decisions_are_compared_and_nan_is_equal_to_nan():
    def ranks(*best):
        return [
            RankState(
                r,
                NAMES,
                KINDS,
                [0] * 4,
                decisions={"EarlyStopping.best": one},
                monitors={"EarlyStopping": "val_score"},
            )
            for r, one in enumerate(best)
        ]

    text = explain(ranks(0.5, None), "after", is_first=False)
    assert "EarlyStopping has best=0.5 on rank 0 and best=None on rank 1" in text
    assert "monitors 'val_score'" in text
    with pytest.raises(ValueError, match="differ"):
        explain(ranks(float("nan"), float("nan")), "after", is_first=False)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (1, 1.0),
        (True, 1),
        (0.0, -0.0),
        (float("nan"), float("nan")),
        ({"a": 1, "b": [2.0]}, {"b": [2], "a": True}),
        (1 << 2000, 1 << 2000),
    ],
)
def test_equal_decisions_have_one_text(own, other):
    assert text_of(own) == text_of(other)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (0.5, None),
        (0, None),
        (1, "1"),
        (1 << 53, (1 << 53) + 1),
        (float("inf"), float("-inf")),
        (0.1, 0.1 + 1e-16),
        ([1, 2], [1, [2]]),
        ({"a": 1}, {"a": 1, "b": 1}),
    ],
)
def test_different_decisions_have_different_texts(own, other):
    assert text_of(own) != text_of(other)


def test_a_graph_checks_in_the_same_steps_as_an_eager_loop():
    counts = np.arange(1, 5000)
    in_graph = _is_due_in_graph(tf.constant(counts, tf.int64)).numpy()
    np.testing.assert_array_equal(in_graph, [is_due(int(n)) for n in counts])
    assert not is_due(1)
    assert is_due(2)
    assert is_due(3072)


@pytest.mark.parametrize("size", [0, 1, 1000, 200_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_fingerprint_changes_with_each_bit(size, dtype):
    values = tf.cast(tf.zeros([size]), dtype)
    same = tf.identity(values)
    assert fingerprint(values) == fingerprint(same)
    if size:
        other = tf.concat([values[:-1], tf.cast([1], dtype)], 0)
        assert fingerprint(other) != fingerprint(values)
        both = fingerprints_in_graph([values, other], 1 << 30).numpy()
        assert both[0] != both[1]
    assert fingerprints([values, same]) == 2 * [fingerprint(values)]


def test_in_a_graph_only_the_beginning_of_large_variables_is_hashed():
    zeros = tf.zeros([100])
    end = tf.concat([zeros[:-1], [1.0]], 0)
    short = fingerprints_in_graph([zeros, end], 40).numpy()
    assert short[0] == short[1]


def test_ranks_with_parts_of_the_data_share_nothing_but_equal_samples():
    rng = np.random.default_rng(0)
    order = rng.permutation(10_000)
    parts = [order[:500], order[500:1000]]
    assert not have_shared_samples(parts)
    with_equal_ones = [part % 50 for part in parts]
    assert not have_shared_samples(with_equal_ones)
    assert not have_shared_samples([np.array([], int), np.array([1, 2, 3])])


def test_ranks_that_shuffle_the_same_data_share_samples():
    rng = np.random.default_rng(0)
    first = [rng.permutation(10_000)[:500] for _ in range(2)]
    assert have_shared_samples(first)
    rank, count = common_samples(first)
    assert rank in (0, 1)
    assert 10 < count < 60


def test_of_many_ranks_each_sends_fewer_hashes():
    assert samples_per_rank(2) == 4096
    assert samples_per_rank(256) == 256
    assert samples_per_rank(5000) == 64


def test_a_tap_hashes_samples_whatever_the_batches_are():
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    taps = [SampleTap(64), SampleTap(64), SampleTap(7)]
    for tap, batched in zip(
        taps, (data.batch(3), data.shuffle(20).batch(8), data.batch(4)), strict=True
    ):
        assert tap.attach(batched).element_spec == batched.element_spec
        assert sum(len(b[1]) for b in tap.attach(batched)) == 20
    assert sorted(taps[0].hashes()) == sorted(taps[1].hashes())
    assert len(set(taps[0].hashes())) == 20
    assert list(taps[2].hashes()) == list(taps[0].hashes()[:7])


def test_a_tap_takes_dicts_single_tensors_and_empty_batches():
    for element in ({"a": np.ones((4, 2))}, np.ones((4, 2))):
        tap = SampleTap(8)
        list(tap.attach(tf.data.Dataset.from_tensor_slices(element).batch(2)))
        assert len(tap.hashes()) == 4
    tap = SampleTap(8)
    list(tap.attach(tf.data.Dataset.from_tensors(np.ones((0, 2)))))
    assert len(tap.hashes()) == 0


def test_only_batches_of_dense_tensors_are_looked_at():
    dense = tf.data.Dataset.from_tensor_slices(np.ones((4, 2)))
    assert can_hash_samples(dense.batch(2))
    assert not can_hash_samples(tf.data.Dataset.from_tensor_slices(np.ones(4)))
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [1, 2]]))
    assert not can_hash_samples(ragged.batch(2))
    assert not can_hash_samples(None)
