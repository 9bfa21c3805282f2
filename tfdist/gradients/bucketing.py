"""Pure functions that cut a list of gradients into buckets.

Backpropagation computes the gradients of the last layers first. By default, buckets are
therefore filled in reverse order of the gradient list, so that the first computed
gradients are reduced while the rest are still being computed. Alternatively, buckets
are filled in the order in which the gradients become ready (`ready_order`). The first
bucket is small, so that communication starts early.

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
    VLDB 2020, sections 3.2.2 and 3.2.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass
class _Bucket:
    """A bucket that is being filled: gradient indices, and total size in bytes."""

    limit_bytes: int
    indices: list[int] = dataclasses.field(default_factory=list)
    size_bytes: int = 0


def cut_buckets(
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    *,
    first_bytes: int,
    bucket_bytes: int,
    fusion_bytes: int,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Assigns every gradient to one bucket.

    Every rank computes the same buckets from the same list, without communication. All
    gradients in a bucket have the same dtype; if a list has several dtypes, one bucket
    for each dtype is filled at a time.

    Args:
        sizes_bytes: size of each gradient in bytes, in the order of the gradient list.
        dtypes: dtype of each gradient, same length.
        first_bytes: size in bytes at which the first bucket is full.
        bucket_bytes: size in bytes at which any later bucket is full.
        fusion_bytes: maximum size of a bucket in bytes, except for a bucket with a
            single larger gradient; 0 puts every gradient into a separate bucket.
        order: all indices in the order in which the gradients are expected to become
            ready; default: descending.

    Returns:
        Buckets in the order in which they are expected to become ready. Each bucket is
        a list of indices into the gradient list, in `order`. Every index occurs once.

    Raises:
        ValueError: the lists differ in length, or a number of bytes is negative.

    Example:
        >>> cut_buckets([4, 4, 8], ["f", "f", "f"], first_bytes=8, bucket_bytes=16,
        ...             fusion_bytes=64)
        [[2], [1, 0]]
    """
    _check(sizes_bytes, dtypes, first_bytes, bucket_bytes, fusion_bytes)
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, _Bucket] = {}
    for index in _backwards(sizes_bytes) if order is None else order:
        size_bytes, dtype = sizes_bytes[index], dtypes[index]
        bucket = open_buckets.get(dtype)
        if bucket is not None and bucket.size_bytes + size_bytes > fusion_bytes:
            closed.append(open_buckets.pop(dtype).indices)
            bucket = None
        if bucket is None:
            is_first = not closed and not open_buckets
            bucket = _Bucket(first_bytes if is_first else bucket_bytes)
            open_buckets[dtype] = bucket
        bucket.indices.append(index)
        bucket.size_bytes += size_bytes
        if fusion_bytes == 0 or bucket.size_bytes >= bucket.limit_bytes:
            closed.append(open_buckets.pop(dtype).indices)
    closed.extend(bucket.indices for bucket in open_buckets.values())
    return closed


def split_evenly(sizes_bytes: Sequence[int], count: int) -> list[list[int]]:
    """Splits a gradient list into contiguous groups of about equal size in bytes.

    Args:
        sizes_bytes: size of each gradient in bytes, in the order of the gradient list.
        count: maximum number of groups, >= 1; there are fewer groups if there are
            fewer gradients.

    Returns:
        The groups, last gradients first. Each group is a descending list of indices.

    Example:
        >>> split_evenly([4, 4, 4, 12], 2)
        [[3], [2, 1, 0]]
    """
    groups: list[list[int]] = []
    open_indices: list[int] = []
    open_bytes, left_bytes = 0, sum(sizes_bytes)
    for index in reversed(range(len(sizes_bytes))):
        open_indices.append(index)
        open_bytes += sizes_bytes[index]
        missing = count - len(groups)
        # Leave at least one gradient for each of the remaining groups.
        if missing > 1 and (open_bytes * missing >= left_bytes or index <= missing - 1):
            groups.append(open_indices)
            left_bytes -= open_bytes
            open_indices, open_bytes = [], 0
    return [*groups, open_indices] if open_indices else groups


def cut_groups(
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    groups: Sequence[Sequence[int]],
    *,
    first_bytes: int,
    bucket_bytes: int,
    fusion_bytes: int,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Assigns every gradient to one bucket; the caller chooses some of the buckets.

    Args:
        sizes_bytes: size of each gradient in bytes, in the order of the gradient list.
        dtypes: dtype of each gradient, same length.
        groups: disjoint lists of indices; each becomes one bucket per dtype, of any
            size. The remaining gradients are assigned by `cut_buckets`.
        first_bytes: see `cut_buckets`; for gradients in no group.
        bucket_bytes: see `cut_buckets`; for gradients in no group.
        fusion_bytes: see `cut_buckets`; for gradients in no group.
        order: see `cut_buckets`.

    Returns:
        Buckets as from `cut_buckets`. A bucket is ready when the last of its gradients
        in `order` is ready; by default, this is the gradient with the lowest index.

    Example:
        >>> cut_groups([4, 4, 8], ["f", "f", "f"], [[0, 2]], first_bytes=8,
        ...            bucket_bytes=16, fusion_bytes=64)
        [[1], [2, 0]]
    """
    order = _backwards(sizes_bytes) if order is None else order
    turn = {index: place for place, index in enumerate(order)}
    buckets: list[list[int]] = []
    for group in groups:
        by_dtype: dict[Hashable, list[int]] = {}
        for index in sorted(group, key=turn.__getitem__):
            by_dtype.setdefault(dtypes[index], []).append(index)
        buckets += by_dtype.values()
    grouped = {index for group in groups for index in group}
    rest = [i for i in order if i not in grouped]
    cut = cut_buckets(
        [sizes_bytes[i] for i in rest],
        [dtypes[i] for i in rest],
        first_bytes=first_bytes,
        bucket_bytes=bucket_bytes,
        fusion_bytes=fusion_bytes,
        order=range(len(rest)),
    )
    buckets += [[rest[i] for i in bucket] for bucket in cut]
    return sorted(buckets, key=lambda one: turn[one[-1]]) if groups else buckets


def _backwards(sizes_bytes: Sequence[int]) -> Sequence[int]:
    return range(len(sizes_bytes) - 1, -1, -1)


def _check(
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    first_bytes: int,
    bucket_bytes: int,
    fusion_bytes: int,
) -> None:
    if len(sizes_bytes) != len(dtypes):
        raise ValueError(
            f"Expected one dtype for each of {len(sizes_bytes)} sizes, got "
            f"{len(dtypes)} dtypes."
        )
    limits = {
        "first_bytes": first_bytes,
        "bucket_bytes": bucket_bytes,
        "fusion_bytes": fusion_bytes,
        "the smallest size": min(sizes_bytes, default=0),
    }
    for name, value in limits.items():
        if value < 0:
            raise ValueError(f"Expected {name} to be at least 0 bytes, got {value}.")
