"""Gradients by the options of Horovod's tapes and optimizers, reduced by tfdist."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfdist
from tfdist import groups as reduction
from tfdist.horovod.common.process_sets import check_initialized, own
from tfdist.horovod.tensorflow._arguments import reduce_op
from tfdist.horovod.tensorflow.compression import wire_name
from tfdist.horovod.tensorflow.reductions import allreduce
from tfdist.local_variables import LocalVariables, identity, is_variable
from tfdist.reduce_options import ReduceOptions
from tfdist.variable_groups import VariableGroups


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """What `DistributedGradientTape` and `DistributedOptimizer` have in common.

    Args:
        device_dense: device for the operations of dense gradients.
        device_sparse: device for those of `tf.IndexedSlices`.
        compression: `Compression.none`, `Compression.fp16` or a class of the user's.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        op: `Average` or `Sum`.
        gradient_predivide_factor: divides before the reduction, multiplies after it.
        groups: None, a number of groups, or a list of lists of variables.
        process_set: the ranks over which gradients are reduced; on others they stay
            as they are.
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks, as those of the average are.

    Raises:
        ValueError: an option is out of range, or they don't go together.
        NotImplementedError: Adasum.
    """

    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: Any
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[Any]] | None
    process_set: Any
    scale_local_gradients: bool

    def __post_init__(self) -> None:
        op = reduce_op(self.op)
        if op not in (tfdist.ReduceOp.AVERAGE, tfdist.ReduceOp.SUM):
            raise ValueError(
                f"Expected op=hvd.Average or hvd.Sum for gradients, got {self.op!r}."
            )
        if self.gradient_predivide_factor != 1 and op is not tfdist.ReduceOp.AVERAGE:
            raise ValueError(
                "Expected op=hvd.Average with gradient_predivide_factor, got "
                f"{self.op!r}. Leave one of them out."
            )
        is_number = isinstance(self.groups, int) and not isinstance(self.groups, bool)
        if (is_number and self.groups < 1) or not (  # type: ignore[operator]
            self.groups is None or is_number or isinstance(self.groups, list | tuple)
        ):
            raise ValueError(
                "Expected groups to be a number > 0 or a list of lists of variables, "
                f"got {self.groups!r}."
            )
        try:
            wire_name(self.compression)
        except LookupError:
            pass

    def reduce(
        self,
        grads: Sequence[Any],
        sources: Sequence[Any],
        local: Sequence[Any] = (),
        *,
        generic_names: bool = False,
        name: str | None = None,
    ) -> list[Any]:
        """The gradients of all ranks.

        Args:
            grads: one for each source: tensor, `tf.IndexedSlices` or None.
            sources: variables, or tensors.
            local: variables and layers whose gradients are not reduced.
            generic_names: whether the ranks may have other names for the variables:
                then their places in the list count.
            name: tells apart lists that are otherwise equal.

        Returns:
            The reduced gradients. One that is None here counts as zeros where another
            rank has one.
        """
        check_initialized()
        members = own(self.process_set)
        if members is not None and not members.included():
            return list(grads)
        found = list(grads)
        places = [i for i, s in enumerate(sources) if is_variable(s)]
        tensors = [i for i in range(len(found)) if i not in places]
        with tf.device(self.device_dense):
            named = [_Named(sources[i], i, generic_names) for i in places]
            ends = self._of_variables([found[i] for i in places], named, local, name)
            for i, end in zip(places, ends, strict=True):
                found[i] = end
        for i in tensors:
            if found[i] is not None:
                found[i] = self._of_tensor(found[i])
        return found

    def _of_variables(
        self,
        grads: list[Any],
        variables: list[_Named],
        local: Sequence[Any],
        name: str | None,
    ) -> list[Any]:
        if not variables:
            return []
        try:
            wire, own_methods = wire_name(self.compression), False
        except LookupError:
            wire, own_methods = None, True
        options = ReduceOptions(
            reduce_op(self.op),
            name=name,
            process_set=own(self.process_set),
            compression=wire,
            sparse_as_dense=bool(self.sparse_as_dense),
            local_variables=LocalVariables(local) if local else None,
            scale_local_gradients=bool(self.scale_local_gradients) or not local,
            groups=self._groups_of(variables),
            gradient_predivide_factor=self.gradient_predivide_factor,
        )
        if own_methods:
            return self._by_own_methods(grads, variables, options)
        return reduction.reduce_gradients(grads, variables, options)

    def _groups_of(self, variables: Sequence[_Named]) -> VariableGroups | None:
        """The groups without what has no gradient here; who is in two, is in the first.

        As Horovod takes them.
        """
        if self.groups is None or isinstance(self.groups, int):
            return None if self.groups is None else VariableGroups(self.groups)
        left = {identity(variable): variable for variable in variables}
        chosen = []
        for group in self.groups:
            known = [identity(one) for one in group]
            chosen.append([left.pop(one) for one in known if one in left])
        listed = [group for group in chosen if group]
        return VariableGroups(listed) if listed else None

    def _by_own_methods(
        self, grads: list[Any], variables: list[_Named], options: ReduceOptions
    ) -> list[Any]:
        """With a compression that tfdist does not know: its methods around the op."""
        full: list[Any] = reduction.fill_missing(grads, variables, options)
        local = options.local_places(variables)
        factor = float(self.gradient_predivide_factor)
        for i, grad in enumerate(full):
            if grad is None:
                continue
            if i in local:
                full[i] = _times(grad, options.local_factor())
                continue
            full[i] = allreduce(
                grad,
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=self.process_set,
            )
        return full

    def _of_tensor(self, grad: Any) -> Any:
        """The gradient of a tensor, which no variable describes."""
        if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices):
            grad = tf.convert_to_tensor(grad)
        factor = float(self.gradient_predivide_factor)
        return allreduce(
            grad,
            device_dense=self.device_dense,
            device_sparse=self.device_sparse,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )


def groups_of(groups: Any, num_groups: int) -> Any:
    """`groups`, or what the deprecated `num_groups` says in its place."""
    if num_groups == 0:
        return groups
    warnings.warn(
        f"num_groups={num_groups!r} is deprecated: write groups={num_groups!r}.",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


class _Named:
    """A variable as the ranks describe it to each other.

    Args:
        variable: of Keras or TensorFlow.
        place: in the list of sources.
        generic: whether it goes by its place, and not by its own name.
    """

    def __init__(self, variable: Any, place: int, generic: bool) -> None:
        own_name = getattr(variable, "path", None) or variable.name
        self.path = f"grad_{place}" if generic else str(own_name)
        shape = tf.TensorShape(variable.shape)
        self.shape = shape if shape.rank is None else tuple(shape.as_list())
        self.dtype = tf.as_dtype(variable.dtype).base_dtype
        self.overwrite_with_gradient = getattr(
            variable, "overwrite_with_gradient", False
        )
        held = getattr(variable, "value", variable)
        self.value = variable if callable(held) else held  # for `identity`
        self.assign = variable.assign


def _times(grad: Any, factor: float) -> Any:
    if factor == 1:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor
