"""How the gradients of a tape or an optimizer are reduced: what the user may choose."""

from __future__ import annotations

import dataclasses

from tfdist._process_sets import ProcessSet, id_of
from tfdist.collectives import ReduceOp
from tfdist.compression import check_compression


@dataclasses.dataclass(frozen=True)
class ReduceOptions:
    """The options that `DistributedGradientTape` and `DistributedOptimizer` share.

    Args:
        op: how the ranks' gradients are combined: `AVERAGE` or `SUM`.
        name: tells apart lists of gradients that are otherwise equal.
        process_set: the ranks that take part; None: all.
        compression: None or a name of `compression.WIRE_TYPES`.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors; None:
            those of small tables are (`sparse.TABLE_BYTES`).

    Raises:
        ValueError: `op` or `compression` is not one of these, or `process_set` has
            ended.
        TypeError: `process_set` is no process set.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    name: str | None = None
    process_set: ProcessSet | None = None
    compression: str | None = None
    sparse_as_dense: bool | None = None

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(
                "Expected op=tfdist.ReduceOp.AVERAGE or SUM for gradients, got "
                f"{self.op!r}: other reductions of gradients do not train a model."
            )
        object.__setattr__(self, "op", ReduceOp(self.op))
        check_compression(self.compression)
        if self.sparse_as_dense not in (None, True, False):
            raise ValueError(
                "Expected sparse_as_dense=None, True or False, got "
                f"{self.sparse_as_dense!r}."
            )
        id_of(self.process_set)  # one that has ended is refused here

    def describe(self) -> str:
        """One line for `agreement`: ranks with other options are refused by it."""
        return (
            f"op={self.op.name.lower()} compression={self.compression or 'none'} "
            f"sparse_as_dense={self.sparse_as_dense} name={self.name or ''}"
        )
