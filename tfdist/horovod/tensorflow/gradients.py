"""Reduces gradients with tfdist, with the options of Horovod's tapes and optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.local_variables import LocalVariables, is_variable
from tfdist.gradients import reduction
from tfdist.gradients.manual_buckets import ManualBuckets
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.sample_weights import weighted
from tfdist.horovod._gradient_origin import note_subset
from tfdist.horovod.common.process_sets import check_initialized, own
from tfdist.horovod.tensorflow._arguments import reduce_op
from tfdist.horovod.tensorflow.compression import wire_name
from tfdist.horovod.tensorflow.reductions import allreduce


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """Options shared by Horovod's tapes and optimizers.

    Args:
        compression: `Compression.none`, `Compression.fp16` or a custom class; or a
            tfdist name: None, "fp16" or "bf16".
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: factor by which gradients are divided before the
            reduction and multiplied afterwards.
        groups: buckets chosen by the user, each reduced in one operation; None:
            gradients are grouped by size.
        process_set: the ranks over which gradients are reduced. All other ranks use
            their own gradients.
        scale_local_gradients: whether, with `Average`, gradients of local variables are
            divided by the number of ranks.

    Raises:
        ValueError: an option is out of range, options contradict each other, or the
            process set is not bound or was removed.
        TypeError: `compression` or `process_set` has an unsupported type.
    """

    compression: Any
    sparse_as_dense: bool
    op: Any
    gradient_predivide_factor: float
    groups: ManualBuckets | None
    process_set: Any
    scale_local_gradients: bool

    def __post_init__(self) -> None:
        op = reduce_op(self.op)
        known = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)
        if op not in known:
            raise ValueError(
                "op currently only supports Average and Sum (in tfdist, Adasum too), "
                f"got {self.op!r}."
            )
        if self.gradient_predivide_factor != 1 and op is not ReduceOp.AVERAGE:
            raise ValueError(
                "gradient_predivide_factor not supported with op != Average: expected "
                f"op=hvd.Average with it, got {self.op!r}. Omit one of them."
            )
        self.has_own_methods()
        own(self.process_set)

    def has_own_methods(self) -> bool:
        """Returns whether the compression is a class with its own methods."""
        try:
            wire_name(self.compression)
        except LookupError:
            return True
        return False

    def of_tfdist(self, local: Sequence[Any] = ()) -> ReduceOptions:
        """Returns the equivalent options of tfdist, without a custom compression.

        Args:
            local: variables and layers whose gradients are not reduced.
        """
        return ReduceOptions(
            reduce_op(self.op),
            process_set=own(self.process_set),
            compression=None if self.has_own_methods() else wire_name(self.compression),
            sparse_as_dense=self._is_dense(),
            local_variables=LocalVariables(local) if local else None,
            scale_local_gradients=bool(self.scale_local_gradients) or not local,
            manual_buckets=self.groups,
            gradient_predivide_factor=self.gradient_predivide_factor,
        )

    def reduce(
        self,
        grads: Sequence[Any],
        sources: Sequence[Any],
        local: Sequence[Any] = (),
        *,
        generic_names: bool = False,
    ) -> list[Any]:
        """Reduces gradients over all ranks.

        Args:
            grads: a tensor, `tf.IndexedSlices` or None for each source.
            sources: the variables or tensors for which the gradients were computed.
            local: variables and layers whose gradients are not reduced.
            generic_names: whether the variables may have different names on the ranks;
                variables are then matched by their index in the list.

        Returns:
            The reduced gradients. A gradient that is None on this rank is treated as
            zeros if another rank has a gradient for the same variable.
        """
        check_initialized()
        options = self.of_tfdist(local)
        if options.process_set is not None:
            note_subset(s for s in sources if is_variable(s))
        if is_outside(options):
            return gradients_of_this_rank(
                [self._dense_if_wanted(g) for g in grads], sources, options
            )
        found = list(grads)
        places = [i for i, s in enumerate(sources) if is_variable(s)]
        for i, grad in enumerate(found):
            if i not in places and grad is not None:
                found[i] = self._by_allreduce(self._dense_if_wanted(grad))
        if not places:
            return found
        named = [_Named(sources[i], i, generic_names) for i in places]
        of_variables = [found[i] for i in places]
        if self.has_own_methods():
            ends = self._by_own_methods(of_variables, named, options)
        else:
            ends = reduction.reduce_gradients(of_variables, named, options)
        for i, end in zip(places, ends, strict=True):
            found[i] = end
        return found

    def fill_missing(
        self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> list[Any]:
        """Replaces missing gradients with zeros if another rank has the gradient.

        Used for gradients that are added up before `reduce`.

        Args:
            grads: a tensor, `tf.IndexedSlices` or None for each variable.
            variables: the variables for which the gradients were computed.
            local: variables and layers whose gradients are not reduced.

        Returns:
            The gradients; None for variables without a gradient on any rank.
        """
        options = self.of_tfdist(local)
        if is_outside(options):
            return list(grads)
        named = [_Named(v, i, False) for i, v in enumerate(variables)]
        return reduction.fill_missing(grads, named, options)

    def _is_dense(self) -> bool:
        """Returns whether gradients are reduced as dense tensors; always for Adasum."""
        return bool(self.sparse_as_dense) or reduce_op(self.op) is ReduceOp.ADASUM

    def _dense_if_wanted(self, grad: Any) -> Any:
        if self._is_dense() and isinstance(grad, tf.IndexedSlices):
            return tf.convert_to_tensor(grad)
        return grad

    def _by_own_methods(
        self, grads: list[Any], variables: list[_Named], options: ReduceOptions
    ) -> list[Any]:
        """Reduces with a custom compression: `compress`, allreduce, `decompress`."""
        full: list[Any] = reduction.fill_missing(
            grads,
            variables,
            options,
            why="a compressor with its own methods is used",
        )
        local = options.local_places(variables)
        for i, grad in enumerate(full):
            if i not in local and grad is not None:
                full[i] = self._by_allreduce(grad)
        return _with_local_factor(full, local, options)

    def _by_allreduce(self, grad: Any) -> Any:
        """Reduces one gradient in a separate operation, e.g. for a source tensor."""
        factor = float(self.gradient_predivide_factor)
        return allreduce(
            grad,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )


def is_outside(options: ReduceOptions) -> bool:
    """Returns whether this rank is not a member of the process set."""
    return options.process_set is not None and not options.process_set.included()


def gradients_of_this_rank(
    grads: Sequence[Any], variables: Sequence[Any], options: ReduceOptions
) -> list[Any]:
    """Returns the gradients for a rank outside the process set, as in Horovod.

    Gradients of local variables are multiplied by `options.local_factor()`; all others
    are returned unchanged.
    """
    return _with_local_factor(grads, options.local_places(variables), options)


def _with_local_factor(
    grads: Sequence[Any], local: Sequence[int], options: ReduceOptions
) -> list[Any]:
    part = options.local_factor() if local else None
    return [
        weighted(g, part) if part is not None and i in local else g
        for i, g in enumerate(grads)
    ]


class _Named:
    """A variable as the ranks compare it: name, shape and dtype.

    Args:
        variable: a Keras or TensorFlow variable.
        place: index of the variable in the list of sources.
        generic: whether to name the variable by this index instead of its own name.
    """

    def __init__(self, variable: Any, place: int, generic: bool) -> None:
        self.name = str(getattr(variable, "path", None) or variable.name)
        self.path = f"grad_{place}" if generic else self.name
        shape = tf.TensorShape(variable.shape)
        self.shape = shape if shape.rank is None else tuple(shape.as_list())
        self.dtype = tf.as_dtype(variable.dtype).base_dtype
        self.overwrite_with_gradient = getattr(
            variable, "overwrite_with_gradient", False
        )
        held = getattr(variable, "value", variable)
        self.value = variable if callable(held) else held  # for `identity`
        self.assign = variable.assign

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the variable's value for TensorFlow; the ranks compare it."""
        return tf.convert_to_tensor(self.value, dtype, name=name)
