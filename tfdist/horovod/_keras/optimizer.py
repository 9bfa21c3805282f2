"""Horovod's `DistributedOptimizer` over tfdist's: the work behind the front modules."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist._process_sets import ProcessSet
from tfdist.collectives import ReduceOp
from tfdist.horovod._keras.passes import accumulate, check_passes, put_before
from tfdist.horovod._keras.variables import CallableList
from tfdist.local_variables import LocalVariables, check_clips_each_alone
from tfdist.reduce_options import ReduceOptions


class Wrapped:
    """Mixin of what Horovod's `DistributedOptimizer` returns, before tfdist's class."""

    # Of tfdist's class, and set by `distributed_optimizer`.
    tfdist_options: ReduceOptions
    horovod_scale_local_gradients: bool

    def register_local_var(self, var: Any) -> None:
        """Makes a variable one of this rank alone: its gradient is not reduced.

        Args:
            var: a variable of Keras or TensorFlow. Call it on all ranks, before the
                first step.

        Raises:
            TypeError: it is no variable.
            RuntimeError: a step has been taken or traced.
            ValueError: the optimizer clips by the norm of all gradients.
        """
        attributes = vars(self)
        if "_horovod_applied" in attributes:
            raise RuntimeError(
                "register_local_var() was called after the first step, whose graph "
                "reduces the gradient. Call it right after DistributedOptimizer(...)."
            )
        check_clips_each_alone(self)
        listed = [*attributes.get("_horovod_local", ()), var]
        options = dataclasses.replace(
            self.tfdist_options,
            local_variables=LocalVariables(listed),
            scale_local_gradients=self.horovod_scale_local_gradients,
        )
        # Past Keras's __setattr__, which would track them.
        attributes["_horovod_local"] = listed
        attributes["tfdist_options"] = options
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            vars(inner)["tfdist_options"] = options

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Any, trainable_variables: Any = None, *, weight: Any = None
    ) -> Any:
        """Reduces the gradients, then updates the variables."""
        vars(self)["_horovod_applied"] = True
        return super().apply(grads, trainable_variables, weight=weight)  # type: ignore[misc]

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables; may also be called, as under Keras 2."""
        listed = super().variables  # type: ignore[misc]
        return listed if isinstance(listed, CallableList) else CallableList(listed)


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    name: str | None = None,
    compression: str | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Horovod's options, with tfdist's values for `op`, `compression`, `process_set`.

    Raises:
        TypeError, ValueError: an option is wrong; the message says what was expected.
    """
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    chosen = check_groups(num_groups, groups)
    check_passes(
        getattr(optimizer, "inner_optimizer", optimizer), backward_passes_per_step
    )
    wrapped = tfdist.DistributedOptimizer(
        optimizer,
        op=op,
        name=name,
        process_set=process_set,
        compression=compression,
        sparse_as_dense=True if sparse_as_dense else None,
        groups=chosen,
        gradient_predivide_factor=gradient_predivide_factor,
    )
    put_before(wrapped, Wrapped)
    vars(wrapped)["horovod_scale_local_gradients"] = scale_local_gradients
    if backward_passes_per_step > 1:
        if hasattr(wrapped, "inner_optimizer"):
            wrapped._reduce_in_the_inner_one()
        accumulate(
            getattr(wrapped, "inner_optimizer", wrapped),
            backward_passes_per_step,
            average_aggregated_gradients,
        )
    return wrapped


def partial_optimizer(
    optimizer: keras.optimizers.Optimizer,
    local_layers: Any,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """As `distributed_optimizer`; the weights of some layers stay on each rank.

    Args:
        optimizer: what to wrap.
        local_layers: a layer, or several, that are built.
        **options: of `distributed_optimizer`.

    Raises:
        TypeError: something is no layer.
        ValueError: a layer is not built.
    """
    layers = local_layers_of(local_layers)
    for layer in layers:
        if not layer.built:
            raise ValueError(
                f"The layer {layer.name!r} of local_layers has no weights yet. Build "
                "it, e.g. by calling the model once, before you wrap the optimizer."
            )
    wrapped = distributed_optimizer(optimizer, **options)
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


def local_layers_of(given: Any) -> list[keras.layers.Layer]:
    """A layer or several, as a list; None is none.

    Raises:
        TypeError: something is no layer.
    """
    if given is None:
        return []
    listed = [given] if isinstance(given, keras.layers.Layer) else given
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        listed = [given]
    listed = list(listed)
    for layer in listed:
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                "Expected local_layers to be a layer or a list of layers, got "
                f"{type(layer).__name__}: {layer!r}."
            )
    return listed


def check_groups(num_groups: int, groups: Any) -> Any:
    """`groups` of tfdist from Horovod's two parameters.

    Args:
        num_groups: the older one; 0: not given.
        groups: None, a number, or lists of variables.

    Returns:
        None, a number or lists.

    Raises:
        ValueError: it is none of these.
    """
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.",
            DeprecationWarning,
            stacklevel=4,
        )
        groups = num_groups if groups is None else groups
    if groups is None or groups == 0:
        return None
    if isinstance(groups, list | tuple):
        return groups
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
        raise ValueError(
            "groups should be a non-negative integer or a list of list of "
            f"tf.Variable, got {groups!r}."
        )
    return groups
