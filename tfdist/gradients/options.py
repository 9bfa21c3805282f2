"""Options for the reduction of the gradients of a tape or an optimizer."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.local_variables import LocalVariables
from tfdist.collectives.reduce_op import check_adasum
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, id_of, members_of
from tfdist.core.rendezvous import renewal
from tfdist.gradients.codec import (
    Codec,
    check_compression,
    check_predivide_factor,
    codec_of,
)
from tfdist.gradients.manual_buckets import ManualBuckets
from tfdist.gradients.xla import check_choice


@dataclasses.dataclass(frozen=True)
class ReduceOptions:
    """The options that `DistributedGradientTape` and `DistributedOptimizer` share.

    Args:
        op: operation that combines the ranks' gradients: `AVERAGE`, `SUM` or `ADASUM`.
        name: name that distinguishes gradient lists that are otherwise equal.
        process_set: the ranks that take part; None: all ranks.
        compression: a key of `codec.CODECS`.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors. None:
            only for tables of less than `sparse.TABLE_BYTES`, and in a loop over an
            elastic `State`. Always True with ADASUM or double buffering.
        local_variables: variables whose gradients are not reduced; None: no variables.
        scale_local_gradients: whether the gradients of local variables are multiplied
            by `local_factor`.
        manual_buckets: buckets chosen by the user; None: buckets are cut by size.
        gradient_predivide_factor: factor by which gradients are divided before the
            reduction and multiplied afterwards.
        xla: one of `xla.CHOICES`; "off": never reduce inside a function that XLA
            compiles. If ranks have different choices, registration raises an error.
        double_buffering: whether each step reduces the gradients of the previous step
            instead of its own (`double_buffer`).

    Raises:
        ValueError: an option has an invalid value, `process_set` has been removed,
            `scale_local_gradients` is False without local variables, a predivide
            factor is given although `op` is not AVERAGE, ADASUM is used with
            `sparse_as_dense=False` or a number of ranks that is not a power of two, or
            double buffering is used with ADASUM, local variables or
            `sparse_as_dense=False`.
        NotImplementedError: ADASUM or double buffering is used in an elastic job.
        TypeError: `name` is not a string, or `process_set` is not a process set.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    name: str | None = None
    process_set: ProcessSet | None = None
    compression: str | None = None
    sparse_as_dense: bool | None = None
    local_variables: LocalVariables | None = None
    scale_local_gradients: bool = True
    manual_buckets: ManualBuckets | None = None
    gradient_predivide_factor: float = 1.0
    xla: str = "auto"
    double_buffering: bool = False

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise ValueError(
                "Expected op=tfdist.ReduceOp.AVERAGE, SUM or ADASUM for gradients, got "
                f"{self.op!r}: other reductions are not valid for training."
            )
        object.__setattr__(self, "op", ReduceOp(self.op))
        if not isinstance(self.name, str | None):
            raise TypeError(f"Expected name to be a string or None, got {self.name!r}.")
        check_compression(self.compression)
        if self.sparse_as_dense not in (None, True, False):
            raise ValueError(
                "Expected sparse_as_dense=None, True or False, got "
                f"{self.sparse_as_dense!r}."
            )
        if self.sparse_as_dense is not None:  # converts 0 to False
            object.__setattr__(self, "sparse_as_dense", bool(self.sparse_as_dense))
        check_choice(self.xla)
        if self.scale_local_gradients not in (True, False):
            raise ValueError(
                "Expected scale_local_gradients=True or False, got "
                f"{self.scale_local_gradients!r}."
            )
        if self.local_variables is None and not self.scale_local_gradients:
            raise ValueError(
                "scale_local_gradients=False has no effect without local_variables. "
                "Pass local_variables, or omit scale_local_gradients."
            )
        check_predivide_factor(self.gradient_predivide_factor)
        if self.gradient_predivide_factor != 1 and self.op is not ReduceOp.AVERAGE:
            raise ValueError(
                "Expected op=tfdist.ReduceOp.AVERAGE with gradient_predivide_factor, "
                f"got {self.op.name}. The factor only applies to averages. Omit "
                "op or gradient_predivide_factor."
            )
        id_of(self.process_set)  # raises if the set has been removed
        if self.op is ReduceOp.ADASUM:
            self._check_adasum()
        if self.double_buffering not in (True, False):
            raise ValueError(
                "Expected double_buffering=True or False, got "
                f"{self.double_buffering!r}."
            )
        if self.double_buffering:
            self._check_double_buffering()

    def _check_adasum(self) -> None:
        if renewal.is_elastic(os.environ):
            raise NotImplementedError(
                "op=tfdist.ReduceOp.ADASUM needs a number of ranks that is a power of "
                "two, which an elastic job cannot guarantee. Start the job without "
                "--min-np, or use op=tfdist.ReduceOp.AVERAGE."
            )
        if runtime.is_initialized():
            check_adasum(self.op, "allreduce", self.process_set)
        if self.sparse_as_dense is False:
            raise ValueError(
                "sparse_as_dense=False cannot be used with op=tfdist.ReduceOp.ADASUM, "
                "which combines whole tensors. Omit sparse_as_dense."
            )
        object.__setattr__(self, "sparse_as_dense", True)

    def _check_double_buffering(self) -> None:
        if renewal.is_elastic(os.environ):
            raise NotImplementedError(
                "double_buffering=True keeps each rank's gradients between steps; if a "
                "rank is lost, its gradients are lost. Start the job without --min-np, "
                "or omit double_buffering."
            )
        for option, is_given, remedy in (
            (
                "op=tfdist.ReduceOp.ADASUM",
                self.op is ReduceOp.ADASUM,
                "Use op=tfdist.ReduceOp.AVERAGE",
            ),
            (
                "local_variables",
                self.local_variables is not None,
                "Omit local_variables",
            ),
            (
                "sparse_as_dense=False",
                self.sparse_as_dense is False and self.op is not ReduceOp.ADASUM,
                "Omit sparse_as_dense",
            ),
        ):
            if is_given:
                raise ValueError(
                    f"{option} cannot be used with double_buffering=True. {remedy}, or "
                    "omit double_buffering."
                )
        object.__setattr__(self, "sparse_as_dense", True)

    def summing(self) -> ReduceOptions:
        """Returns a copy with op=SUM, for weighted gradients whose sum is the mean."""
        summing = copy.copy(self)
        object.__setattr__(summing, "op", ReduceOp.SUM)
        return summing

    def codec(self) -> Codec:
        """Returns the codec that encodes gradients for the reduction."""
        return codec_of(self.compression, self.gradient_predivide_factor)

    def local_places(self, variables: Sequence[Any]) -> list[int]:
        """Returns the indices of the variables whose gradients are not reduced."""
        if self.local_variables is None:
            return []
        return self.local_variables.places(variables)

    def local_members(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the local variables that are known so far, trained or not.

        Args:
            variables: the trained variables, of which some may be local.
        """
        if self.local_variables is None:
            return []
        places = self.local_variables.places(variables)
        return [*(variables[i] for i in places), *self.local_variables.listed()]

    def local_factor(self) -> tf.Tensor | None:
        """Returns the factor for the gradients of local variables; None: always 1.

        A local variable affects only this rank's loss. The gradient of the mean of the
        ranks' losses is therefore 1/size times the gradient of this rank's loss.

        Returns:
            Scalar float64 tensor, from `size_when_run`; or None.
        """
        if self.op is not ReduceOp.AVERAGE or not self.scale_local_gradients:
            return None
        size = size_when_run(self.process_set)
        return None if size is None else 1.0 / size

    def describe(self, variables: Sequence[Any]) -> str:
        """Returns the options as one line, which the ranks compare."""
        more = "" if self.scale_local_gradients else "scale_local_gradients=False "
        if self.manual_buckets is not None:
            more += f"groups={self.manual_buckets.describe(variables)} "
        if self.gradient_predivide_factor != 1:
            more += f"gradient_predivide_factor={self.gradient_predivide_factor!r} "
        if self.double_buffering:
            more += "double_buffering=True "
        name = quote(self.name or "")  # without spaces, since the core parses it
        return (
            f"op={self.op.name.lower()} compression={self.compression or 'none'} "
            f"sparse_as_dense={self.sparse_as_dense} {more}name={name}"
        )


def size_may_change(process_set: ProcessSet | None) -> bool:
    """Returns whether a step that is traced now may run with more or fewer ranks."""
    return process_set is None and renewal.is_elastic(os.environ)


def size_when_run(process_set: ProcessSet | None) -> tf.Tensor | None:
    """Returns the number of ranks as a scalar float64 tensor; None if it is always 1.

    In an elastic job, the tensor is computed when the step runs, because functions are
    not traced again when the ranks change.
    """
    if size_may_change(process_set):
        return tf.cast(ops().tfdist_topology()[1], tf.float64)
    size = len(members_of(process_set))
    return None if size == 1 else tf.constant(size, tf.float64)
