"""Pure functions that compute the order in which gradients become ready.

tfdist starts to reduce a bucket when the bucket's last gradient is ready. Buckets in
the order of the gradient list are therefore late if gradients that are adjacent in the
list become ready at very different times. This happens, for example, if variables were
created in a different order than the model uses them, or if a variable is used at both
ends of the model. The *level* of a gradient, the number of operations on the longest
path to it, is computed from the traced graph (`graph_levels`). See
docs/design/0008-observed-order.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Buckets = Sequence[Sequence[int]]


def filled(levels: Sequence[int | None]) -> list[int]:
    """Replaces unknown levels with known ones.

    Each None is replaced with the next known level in the list or, if no known level
    follows, with the last known level.

    Args:
        levels: level of each gradient; None for a gradient that this rank lacks.

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
    """Returns the indices of gradients in the order in which they become ready.

    Args:
        levels: level of each gradient.

    Returns:
        All indices by increasing level. Indices of equal level are in descending order,
        as in the default order of `cut_buckets`.

    Example:
        >>> order_of([7, 3, 5, 5])
        [1, 3, 2, 0]
    """
    return sorted(reversed(range(len(levels))), key=levels.__getitem__)


def bits_of(order: Sequence[int]) -> list[bool]:
    """Encodes an order as flags; with two or more indices, at least one flag is set.

    Example:
        >>> bits_of([1, 0])
        [True, False]
    """
    width = _width(len(order))
    return [bool(index >> bit & 1) for index in order for bit in range(width)]


def order_from(bits: Sequence[bool], count: int) -> list[int] | None:
    """Decodes the order of `count` indices from the flags of `bits_of`.

    Returns:
        The order; None if no flag is set, which means that no rank sent an order.

    Raises:
        ValueError: the flags do not encode an order.

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
    """Estimates the bytes that are not yet reduced when the last gradient is ready.

    The estimate assumes that the backward pass takes as long as the reduction of all
    bytes, that all levels take equally long, and that buckets are reduced one after
    another as they become ready, so end_j = max(end_(j-1), t_j) + bytes_j. The order of
    the buckets has the largest effect in this case. With a faster network, nearly all
    communication is hidden in any order, and with a slower network, little of it is.

    Args:
        buckets: for each bucket, the indices of its gradients in the list.
        levels: level of each gradient.
        sizes_bytes: size of each gradient in bytes.

    Returns:
        Number of bytes: at least the size of the bucket that is ready last, at most the
        size of all buckets together.

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
    """A comparison of buckets in list order with buckets in ready order.

    A gradient's wait is measured in bytes times levels: its size times the
    number of levels by which it is ready before the last gradient of its bucket.

    Attributes:
        total_bytes: size of all gradients.
        listed_bytes: bytes not yet reduced when the last gradient is ready, with
            buckets in list order (`bytes_left`).
        observed_bytes: bytes not yet reduced at that time, with buckets in ready order.
        held: index, in list order, of the bucket whose gradients wait most in total.
        early: index of the gradient in bucket `held` that waits most.
        late: index of the gradient in bucket `held` that is ready last.
    """

    total_bytes: int
    listed_bytes: float
    observed_bytes: float
    held: int
    early: int
    late: int

    @property
    def matters(self) -> bool:
        """Whether ready order hides at least 1 MiB and 10 % of all bytes more."""
        gain = self.listed_bytes - self.observed_bytes
        return gain >= max(self.total_bytes / 10, 1 << 20)


def compare(
    listed: Buckets,
    observed: Buckets,
    levels: Sequence[int],
    sizes_bytes: Sequence[int],
) -> Comparison:
    """Compares buckets in list order with buckets in ready order.

    Args:
        listed: buckets in list order.
        observed: buckets in ready order.
        levels: level of each gradient.
        sizes_bytes: size of each gradient in bytes.
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
