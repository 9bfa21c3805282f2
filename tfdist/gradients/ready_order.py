"""Gradients in the order in which they are made: as pure functions.

A bucket can leave when the last of its gradients is made. Buckets cut along the list of
gradients are therefore late where the list has neighbours that are made at very
different times: variables that are listed in another order than they are used, or one
that is used at both ends of a model. The traced graph tells when each gradient can be
made (`graph_levels`): its *level*, the number of operations on the longest way that
leads to it. See docs/design/0008-observed-order.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Buckets = Sequence[Sequence[int]]


def filled(levels: Sequence[int | None]) -> list[int]:
    """Levels without gaps.

    Args:
        levels: of each gradient; None: not known on this rank, which lacks it. It goes
            with the one behind it in the list or, behind the last known one, with that.

    Example:
        >>> filled([7, None, 5, None])
        [7, 5, 5, 5]
    """
    last = next((one for one in reversed(levels) if one is not None), 0)
    found: list[int] = []
    for level in reversed(levels):
        last = last if level is None else level
        found.append(last)
    return found[::-1]


def order_of(levels: Sequence[int]) -> list[int]:
    """The indices of a list of gradients, in the order in which they are made.

    Args:
        levels: of each gradient.

    Returns:
        Every index once; those of equal level descending, as in the plan by the list.

    Example:
        >>> order_of([7, 3, 5, 5])
        [1, 3, 2, 0]
    """
    return sorted(reversed(range(len(levels))), key=levels.__getitem__)


def bits_of(order: Sequence[int]) -> list[bool]:
    """An order as flags, of which at least one is set if it has two or more indices.

    Example:
        >>> bits_of([1, 0])
        [True, False]
    """
    width = _width(len(order))
    return [bool(index >> bit & 1) for index in order for bit in range(width)]


def order_from(bits: Sequence[bool], count: int) -> list[int] | None:
    """The order of `count` indices that `bits_of` has made these flags of.

    Returns:
        None where no flag is set: nobody has told an order.

    Raises:
        ValueError: the flags are not those of an order.

    Example:
        >>> order_from(bits_of([2, 0, 1]), 3)
        [2, 0, 1]
    """
    if not any(bits):
        return None
    width = _width(count)
    places = [bits[i : i + width] for i in range(0, len(bits), width)]
    order = [sum(bit << i for i, bit in enumerate(place)) for place in places]
    if sorted(order) != list(range(count)):
        raise ValueError(f"Expected an order of {count} gradients, got {order}.")
    return order


def _width(count: int) -> int:
    return max(1, (count - 1).bit_length())


def bytes_left(
    buckets: Buckets, levels: Sequence[int], sizes_bytes: Sequence[int]
) -> float:
    """How many bytes are still to be reduced when the last gradient is made.

    The backward pass takes as long as reducing all bytes would, each level equally
    long, and buckets are reduced one after the other, as they become ready:
    end_j = max(end_(j-1), t_j) + bytes_j. That is the case in which the order of
    buckets counts most: a faster network hides nearly all of any, a slower one little.

    Args:
        buckets: indices into the list of gradients.
        levels: of each gradient.
        sizes_bytes: likewise.

    Returns:
        Bytes: at least those of the bucket that is ready last, at most all.

    Example:
        >>> bytes_left([[1], [0]], [9, 5], [10, 30])
        10.0
        >>> bytes_left([[1, 0]], [9, 5], [10, 30])
        40.0
    """
    total = sum(sizes_bytes)
    first, last = min(levels), max(levels)
    pace = total / (last - first) if last > first else 0.0
    ready = sorted(
        ((max(levels[i] for i in one) - first) * pace, sum(sizes_bytes[i] for i in one))
        for one in buckets
    )
    end = 0.0
    for begin, size_bytes in ready:
        end = max(end, begin) + size_bytes
    return end - (last - first) * pace


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The buckets of the list beside those of the order in which gradients are made.

    Attributes:
        total_bytes: of all gradients.
        listed_bytes: of them still to be reduced when the last gradient is made, in
            the buckets of the list (`bytes_left`).
        observed_bytes: the same in the order in which they are made.
        held: the bucket of the list, its number, that holds back most.
        early: the largest gradient of it that is made long before
        late: the one that is made last; indices into the list.
    """

    total_bytes: int
    listed_bytes: float
    observed_bytes: float
    held: int
    early: int
    late: int

    @property
    def matters(self) -> bool:
        """Whether a tenth of the bytes, and 1 MiB, would be hidden in addition."""
        gain = self.listed_bytes - self.observed_bytes
        return gain >= max(self.total_bytes / 10, 1 << 20)


def compare(
    listed: Buckets,
    observed: Buckets,
    levels: Sequence[int],
    sizes_bytes: Sequence[int],
) -> Comparison:
    """Compares the order in which gradients are made with the order of the list.

    Args:
        listed: buckets along the list.
        observed: buckets along the order in which they are made.
        levels: of each gradient.
        sizes_bytes: likewise.
    """

    def held(bucket: Sequence[int]) -> int:
        last = max(levels[i] for i in bucket)
        return sum((last - levels[i]) * sizes_bytes[i] for i in bucket)

    worst = max(range(len(listed)), key=lambda number: held(listed[number]))
    late = max(listed[worst], key=lambda i: levels[i])
    early = max(
        listed[worst], key=lambda i: (levels[late] - levels[i]) * sizes_bytes[i]
    )
    return Comparison(
        sum(sizes_bytes),
        bytes_left(listed, levels, sizes_bytes),
        bytes_left(observed, levels, sizes_bytes),
        worst,
        early,
        late,
    )
