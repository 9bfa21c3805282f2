"""Cutting a gradient list into buckets: a pure function, tested as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.gradients.bucketing import cut_buckets, cut_groups, split_evenly

MIB = 1 << 20


def cut(sizes, dtypes=None, first=MIB, bucket=8 * MIB, fusion=64 * MIB):
    return cut_buckets(
        sizes,
        dtypes or ["float32"] * len(sizes),
        first_bytes=first,
        bucket_bytes=bucket,
        fusion_bytes=fusion,
    )


def test_buckets_follow_the_list_backwards_and_the_first_is_small():
    assert cut([2 * MIB] * 8) == [[7], [6, 5, 4, 3], [2, 1, 0]]


def test_no_gradients_no_buckets():
    assert cut([]) == []


def test_fusion_threshold_zero_gives_each_gradient_its_own_bucket():
    assert cut([4, 0, 8], fusion=0) == [[2], [1], [0]]


def test_fusion_threshold_bounds_a_bucket():
    assert cut([3, 3, 3, 3], first=100, bucket=100, fusion=6) == [[3, 2], [1, 0]]


def test_a_gradient_above_the_fusion_threshold_travels_alone():
    assert cut([2, 50, 2], first=100, bucket=100, fusion=10) == [[2], [1], [0]]


def test_a_bucket_holds_one_dtype():
    buckets = cut([4, 4, 4, 4], dtypes=["f", "h", "f", "h"], first=100, bucket=100)
    assert buckets == [[3, 1], [2, 0]]


def test_of_several_dtypes_only_one_bucket_is_first():
    buckets = cut([4] * 6, dtypes=["f", "h"] * 3, first=8, bucket=12)
    assert buckets == [[5, 3], [4, 2, 0], [1]]


@pytest.mark.parametrize("name", ["first", "bucket", "fusion"])
def test_negative_limits_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}_bytes"):
        cut([1], **{name: -1})


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 dtypes"):
        cut([1], dtypes=["f", "f"])


limits = st.integers(0, 40)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("fhd")), max_size=30),
    limits,
    limits,
    limits,
)
def test_every_gradient_is_in_one_bucket_of_its_dtype_within_the_threshold(
    gradients, first, bucket, fusion
):
    sizes = [size for size, _ in gradients]
    dtypes = [dtype for _, dtype in gradients]
    buckets = cut(sizes, dtypes, first, bucket, fusion)
    assert sorted(i for members in buckets for i in members) == list(range(len(sizes)))
    for members in buckets:
        assert members == sorted(members, reverse=True)
        assert len({dtypes[i] for i in members}) == 1
        assert len(members) == 1 or sum(sizes[i] for i in members) <= fusion


@given(st.lists(st.integers(0, 30), max_size=30), limits, limits, limits)
def test_a_bucket_closes_as_soon_as_it_is_full(sizes, first, bucket, fusion):
    buckets = cut(sizes, None, first, bucket, fusion)
    for number, members in enumerate(buckets):
        limit = bucket if number else first
        assert len(members) == 1 or sum(sizes[i] for i in members[:-1]) < limit


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([], 3, []),
        ([5], 3, [[0]]),
        ([1, 1, 1, 1], 1, [[3, 2, 1, 0]]),
        ([1, 1, 1, 1], 2, [[3, 2], [1, 0]]),
        ([1, 1, 1, 1], 4, [[3], [2], [1], [0]]),
        ([1, 1, 1, 1], 9, [[3], [2], [1], [0]]),
        ([4, 4, 4, 12], 2, [[3], [2, 1, 0]]),
        ([100, 1, 1], 3, [[2], [1], [0]]),
        ([100, 1, 1], 2, [[2, 1], [0]]),
        ([1] * 6, 3, [[5, 4], [3, 2], [1, 0]]),
        ([2] * 9, 3, [[8, 7, 6], [5, 4, 3], [2, 1, 0]]),
        ([3, 3, 3, 3, 12], 3, [[4], [3, 2], [1, 0]]),
        ([0, 0, 0], 2, [[2], [1, 0]]),
    ],
)
def test_a_list_is_split_into_so_many_neighbours(sizes, count, expected):
    assert split_evenly(sizes, count) == expected


def test_groups_by_hand_are_buckets_and_the_rest_is_cut_as_ever():
    limits = {"first_bytes": 4, "bucket_bytes": 8, "fusion_bytes": 8}
    sizes, dtypes = [4] * 6, ["f", "f", "d", "f", "f", "f"]
    assert cut_groups(sizes, dtypes, [], **limits) == cut_buckets(
        sizes, dtypes, **limits
    )
    # A group of two dtypes is two buckets, and of any size; ready with its lowest.
    groups = [[0, 2, 3, 5]]
    assert cut_groups(sizes, dtypes, groups, **limits) == [[4], [2], [1], [5, 3, 0]]
