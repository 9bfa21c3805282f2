"""The order in which gradients are made: pure functions, and what a graph tells."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist.gradients import ready_order
from tfdist.gradients.bucketing import cut_buckets, cut_groups
from tfdist.gradients.graph_levels import levels_of

MIB = 1 << 20
LIMITS = {"first_bytes": MIB, "bucket_bytes": 8 * MIB, "fusion_bytes": 64 * MIB}


@given(st.permutations(range(40)), st.integers(1, 40))
def test_an_order_survives_its_flags(order, count):
    order = [index for index in order if index < count]
    found = ready_order.order_from(ready_order.bits_of(order), count)
    assert found == (order if count > 1 else None)


def test_flags_that_nobody_has_set_are_no_order_and_others_are_refused():
    assert ready_order.order_from([False] * 6, 3) is None
    with pytest.raises(ValueError, match="order of 3 gradients"):
        ready_order.order_from([True] * 6, 3)


def test_equal_levels_keep_the_order_of_the_list():
    assert ready_order.order_of([4, 4, 2, 2]) == [3, 2, 1, 0]


def test_a_gradient_that_is_not_known_goes_with_its_neighbour():
    assert ready_order.filled([None, 9, None, 3, None]) == [9, 9, 3, 3, 3]
    assert ready_order.filled([None, None]) == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("fhd")), max_size=30),
    st.randoms(use_true_random=False),
)
def test_buckets_along_an_order_hold_every_gradient_once_and_in_that_order(
    gradients, random
):
    sizes = [size for size, _ in gradients]
    dtypes = [dtype for _, dtype in gradients]
    order = random.sample(range(len(sizes)), len(sizes))
    limits = {"first_bytes": 20, "bucket_bytes": 40, "fusion_bytes": 60}
    buckets = cut_buckets(sizes, dtypes, order=order, **limits)
    assert sorted(i for one in buckets for i in one) == list(range(len(sizes)))
    turn = {index: place for place, index in enumerate(order)}
    for one in buckets:
        assert one == sorted(one, key=turn.__getitem__)
        assert len({dtypes[i] for i in one}) == 1


def test_buckets_by_hand_stay_and_are_ready_with_their_last_gradient():
    limits = {"first_bytes": 4, "bucket_bytes": 8, "fusion_bytes": 8}
    order = [0, 2, 1, 5, 3, 4]
    found = cut_groups([4] * 6, ["f"] * 6, [[1, 2]], order=order, **limits)
    assert found == [[0], [2, 1], [5, 3], [4]]


def compared(levels, sizes):
    dtypes = ["f"] * len(sizes)
    order = ready_order.order_of(levels)
    return ready_order.compare(
        cut_buckets(sizes, dtypes, **LIMITS),
        cut_buckets(sizes, dtypes, order=order, **LIMITS),
        levels,
        sizes,
    )


def test_a_list_in_the_order_of_use_has_nothing_to_gain():
    found = compared([40, 30, 20, 10], [8 * MIB] * 4)
    assert found.listed_bytes == found.observed_bytes
    assert not found.matters


def test_a_late_gradient_in_an_early_bucket_is_named():
    # Encoder and decoder, listed in pairs; buckets are [7] [6, 5] [4, 3] [2, 1] [0].
    levels = [80, 10, 70, 20, 60, 30, 50, 40]
    found = compared(levels, [4 * MIB] * 8)
    assert found.matters
    assert found.observed_bytes < found.listed_bytes
    assert (found.held, found.early, found.late) == (3, 1, 2)


def test_a_bucket_of_late_gradients_holds_nothing_back():
    buckets = [[3, 2], [1, 0]]
    found = ready_order.compare(buckets, buckets, [40, 10, 100, 100], [MIB] * 4)
    assert (found.held, found.early, found.late) == (1, 1, 0)


def test_few_bytes_never_matter():
    assert not compared([80, 10, 70, 20], [1000] * 4).matters


@pytest.mark.parametrize(
    ("total", "gain", "matters"),
    [
        (4 * MIB, MIB, True),
        (4 * MIB, MIB - 1, False),
        (20 * MIB, 2 * MIB, True),
        (20 * MIB, 2 * MIB - 1, False),
    ],
)
def test_a_tenth_of_the_bytes_matters_from_one_mib_on(total, gain, matters):
    found = ready_order.Comparison(total, 3.0 * MIB, 3.0 * MIB - gain, 0, 0, 0)
    assert found.matters == matters


def test_gradients_that_are_made_at_the_same_time_are_all_left():
    assert ready_order.bytes_left([[1], [0]], [5, 5], [10, 30]) == 40.0


def test_levels_of_a_graph_follow_the_backward_pass_not_the_list():
    late, early, shared = (tf.Variable(1.0) for _ in range(3))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.sin(tf.sin(x * shared * late) * early) * shared
        grads = tape.gradient(loss, [late, early, shared])
        grads.append(tf.constant(1.0))
        found.extend(levels_of([*grads, None]))
        return grads

    found = []
    step(tf.constant(2.0))
    late_level, early_level, shared_level, constant, missing = found
    assert constant < early_level < late_level < shared_level
    assert missing is None


def test_what_comes_from_outside_of_the_graph_has_no_level():
    outside = tf.constant(2.0)

    @tf.function
    def step(x):
        found.extend(levels_of([outside, x, x * x]))
        return x

    found = []
    step(outside)
    nothing, argument, product = found
    assert nothing is None
    assert argument < product
