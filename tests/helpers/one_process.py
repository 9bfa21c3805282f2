"""What the collectives give, computed in one process from the inputs of all ranks.

Works on lists of NumPy arrays and of TensorFlow tensors alike, so that gradients of
the ranks can be compared with TensorFlow's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def even_splits(rows: int, size: int) -> list[int]:
    """The default: the first `rows % size` ranks get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def parts(x: Any, splits: Sequence[int]) -> list[Any]:
    """Consecutive rows of `x`."""
    ends = [sum(splits[: i + 1]) for i in range(len(splits))]
    return [x[end - count : end] for end, count in zip(ends, splits, strict=True)]


def outputs(
    kind: str,
    xs: Sequence[Any],
    concat: Callable[[list[Any]], Any],
    *,
    splits: Any = None,
    root: int = 0,
    scale: Any = 1,
) -> list[Any]:
    """The result of each rank.

    Args:
        kind: name of the function of `tfdist`.
        xs: the input of each rank, with at least one dimension.
        concat: puts a list one after the other along the first dimension.
        splits: as given to the function; for alltoall those of each rank.
        root: likewise.
        scale: factor of a sum.
    """
    size = len(xs)
    if kind == "allgather":
        return [concat(list(xs))] * size
    if kind == "broadcast":
        return [xs[root]] * size
    if kind == "gather":
        return [concat(list(xs)) if r == root else xs[r][:0] for r in range(size)]
    if kind == "scatter":
        return parts(xs[root], splits or even_splits(len(xs[root]), size))
    if kind == "alltoall":
        equal = [[len(x) // size] * size for x in xs]
        sent = [parts(x, s) for x, s in zip(xs, splits or equal, strict=True)]
        return [concat([sent[s][r] for s in range(size)]) for r in range(size)]
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    if scale != 1:
        total = total * scale
    if kind == "reduce":
        return [total if r == root else xs[r] for r in range(size)]
    assert kind == "reduce_scatter"
    return parts(total, splits or even_splits(len(total), size))
