"""Horovod's `DistributedOptimizer` for Keras, based on tfdist's."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.local_variables import (
    check_clips_each_alone,
    with_local_variable,
)
from tfdist.gradients.options import ReduceOptions
from tfdist.horovod._keras.passes import (
    CountsPasses,
    SumsPasses,
    check_passes,
    put_before,
)
from tfdist.horovod._keras.variables import CallableList
from tfdist.horovod._warnings import warn_unused_device
from tfdist.horovod.common.process_sets import global_process_set
from tfdist.horovod.common.reduce_ops import Average
from tfdist.horovod.tensorflow._groups import groups_of
from tfdist.horovod.tensorflow._partial import has_parameters_of, layers_of
from tfdist.horovod.tensorflow.compression import Compression
from tfdist.horovod.tensorflow.gradients import (
    GradientOptions,
    gradients_of_this_rank,
    is_outside,
)
from tfdist.training.optimizer import wrap_optimizer
from tfdist.training.optimizer_mixins import ReducesUpdates


class Wrapped:
    """Mixin for the optimizer that Horovod's `DistributedOptimizer` returns."""

    # Class attributes, set by tfdist or on the class that `DistributedOptimizer`
    # creates for this optimizer and its copies. `horovod_has_local` is True if any
    # optimizer of that class has local variables. `horovod_inner_mixins` are the mixins
    # of the optimizer inside a LossScaleOptimizer.
    tfdist_options: ReduceOptions
    horovod_scale_local_gradients: bool
    horovod_has_local: bool = False
    horovod_inner_mixins: tuple[type, ...] = ()

    def register_local_var(self, var: Any) -> None:
        """Makes a variable local to each rank: its gradient is not reduced.

        Call this method on all ranks, before the first step.

        Args:
            var: a Keras or TensorFlow variable, or a layer for all of its variables.

        Raises:
            TypeError: `var` is not a variable or layer.
            RuntimeError: a step has been taken or traced.
            ValueError: the optimizer clips by the global norm of the gradients.
        """
        attributes = vars(self)
        if "_horovod_applied" in attributes:
            raise RuntimeError(
                "register_local_var() was called after the first step, which was "
                "built to reduce the gradient of this variable. Call it right after "
                "DistributedOptimizer(...)."
            )
        check_clips_each_alone(self)
        options = dataclasses.replace(
            self.tfdist_options,
            local_variables=with_local_variable(
                self.tfdist_options.local_variables, var
            ),
            scale_local_gradients=self.horovod_scale_local_gradients,
        )
        type(self).horovod_has_local = True
        # Bypasses Keras's __setattr__, which would track the local variables.
        attributes["tfdist_options"] = options
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            vars(inner)["tfdist_options"] = options

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **named: Any) -> Any:
        """Returns a new optimizer, without local variables: the config has none."""
        made = super().from_config(config, *args, **named)  # type: ignore[misc]
        vars(made)["_horovod_asks"] = cls.horovod_has_local
        if cls.horovod_inner_mixins:
            made._add_inner_mixins()
        return made

    def _add_inner_mixins(self) -> None:
        self._reduce_in_the_inner_one()  # type: ignore[attr-defined]
        for mixin in self.horovod_inner_mixins:
            put_before(self.inner_optimizer, mixin)  # type: ignore[attr-defined]

    def _check_local(self) -> None:
        """Raises if `from_config` created this optimizer without its local variables.

        Raises:
            RuntimeError: no local variables have been registered since; their gradients
                would be averaged.
        """
        asks = vars(self).get("_horovod_asks", False)
        if asks and self.tfdist_options.local_variables is None:
            raise RuntimeError(
                f"The optimizer {self.name!r} was created by from_config() from an "  # type: ignore[attr-defined]
                "optimizer with local variables, which a configuration does not "
                "contain: their gradients would be averaged. Call "
                "register_local_var(variable) for each of them on the new optimizer, "
                "before the first step; copy.deepcopy(optimizer) keeps them. If no "
                "variable should be local, wrap a new optimizer."
            )

    def _reduced(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        self._check_local()
        return super()._reduced(grads, variables, weight)  # type: ignore[misc,no-any-return]

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Any,
        trainable_variables: Any = None,
        *,
        weight: Any = None,
        **own: Any,
    ) -> Any:
        """Reduces the gradients, then updates the variables."""
        self._check_local()
        vars(self)["_horovod_applied"] = True
        return super().apply(grads, trainable_variables, weight=weight, **own)  # type: ignore[misc]

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables, as a list that can be called as in Keras 2."""
        listed = super().variables  # type: ignore[misc]
        return listed if isinstance(listed, CallableList) else CallableList(listed)


class OwnSteps:
    """Mixin for the wrapped optimizer on a rank outside the process set.

    The mixin precedes tfdist's class in the method resolution order, and calls the
    methods of Keras's class directly. Gradients are not reduced, and no decision
    depends on other ranks.
    """

    # Attributes of tfdist's class.
    tfdist_options: ReduceOptions

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Any,
        trainable_variables: Any = None,
        *,
        weight: Any = None,
        **own: Any,
    ) -> Any:
        """Updates the variables; `weight` has no effect without other ranks."""
        del weight
        grads = list(grads)
        variables = self._variables_of(grads, trainable_variables)  # type: ignore[attr-defined]
        grads = gradients_of_this_rank(grads, variables, self.tfdist_options)
        return super(ReducesUpdates, self).apply(grads, variables, **own)  # type: ignore[misc]

    def apply_gradients(
        self, grads_and_vars: Any, *, weight: Any = None, **own: Any
    ) -> Any:
        """Calls `apply` with (gradient, variable) pairs; returns the step count."""
        del weight
        super(ReducesUpdates, self).apply_gradients(grads_and_vars, **own)  # type: ignore[misc]
        return self._iterations  # type: ignore[attr-defined]

    def check_finite(self, grads: Any) -> Any:
        """Returns whether this rank's gradients are finite; for LossScaleOptimizer."""
        return super(ReducesUpdates, self).check_finite(grads)  # type: ignore[misc]


class OwnUpdates:
    """Mixin for an accumulating optimizer outside the process set: no reduction."""

    def _clip_gradients(self, grads: Any) -> Any:
        return super(ReducesUpdates, self)._clip_gradients(grads)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients over all ranks.

    The optimizer is changed in place and returned (Horovod returns a copy). Its class
    keeps the name, so a saved model refers to the Keras class and loads without tfdist.
    The returned optimizer has a method `register_local_var(var)`, which excludes the
    gradient of a variable from the reduction. See `tfdist.DistributedOptimizer`.

    Args:
        optimizer: a Keras optimizer, possibly wrapped in a `LossScaleOptimizer`.
        name: name that distinguishes optimizers with equal lists of variables; default:
            they are distinguished by their order.
        device_dense: ignored, with a warning.
        device_sparse: ignored, with a warning.
        compression: `Compression.none` (default), `Compression.fp16` or "bf16".
        sparse_as_dense: if True, gradients of embeddings are reduced as dense tensors.
            If False, only the rows in use are reduced for embedding tables of 8 MiB or
            more; gradients of smaller tables are reduced as dense tensors, which is
            faster. The results are equal.
        gradient_predivide_factor: factor f: gradients are multiplied by 1/f before the
            sum and by f/size after the sum; only with `Average`.
        op: `Average` or `Sum`; or `Adasum`, which combines the ranks' changes of the
            weights (see `tfdist.DistributedOptimizer`).
        backward_passes_per_step: number of batches whose gradients are added up before
            they are reduced and applied. `optimizer.iterations` counts batches.
        average_aggregated_gradients: whether to apply the mean of these gradients
            instead of their sum.
        num_groups: deprecated; use `groups`.
        groups: number of buckets, or a list with a list of variables for each bucket.
            One operation reduces the gradients of a bucket. Default: buckets of
            `TFDIST_BUCKET_BYTES`. The results are bitwise identical in all cases.
        process_set: the ranks over which gradients are reduced. All other ranks use
            their own gradients (gradients of local variables are still divided).
        scale_local_gradients: whether, with `Average`, gradients of local variables are
            divided by the number of ranks.

    Returns:
        The optimizer. Under the policy `mixed_float16`, a `LossScaleOptimizer` around
        the optimizer. It scales the loss in `fit`, and in custom loops that call its
        `scale_loss`.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer.
        ValueError: `optimizer` is already wrapped, an option is invalid, or
            `backward_passes_per_step` is used with Adasum or with a class that
            overrides `apply_gradients`.
    """
    warn_unused_device("device_dense", device_dense)
    warn_unused_device("device_sparse", device_sparse)
    options = GradientOptions(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if options.has_own_methods():
        raise ValueError(
            "Expected compression=hvd.Compression.none or hvd.Compression.fp16 (or "
            f"'bf16'), got {compression!r}: the gradients of a Keras optimizer are "
            "cast inside the reduction, where a compressor's own methods are not "
            "called. hvd.DistributedGradientTape calls these methods."
        )
    check_passes(
        getattr(optimizer, "inner_optimizer", optimizer), backward_passes_per_step
    )
    reduced = dataclasses.replace(
        options.of_tfdist(),
        name=name,
        sparse_as_dense=True if sparse_as_dense else None,
    )
    if backward_passes_per_step > 1 and reduced.op is ReduceOp.ADASUM:
        raise ValueError(
            "Expected backward_passes_per_step=1 with op=hvd.Adasum, got "
            f"{backward_passes_per_step}. Use a larger batch size."
        )
    wrapped = wrap_optimizer(optimizer, reduced)
    stays_out = is_outside(reduced)
    if stays_out:
        put_before(wrapped, OwnSteps)
    put_before(wrapped, Wrapped)
    type(wrapped).horovod_scale_local_gradients = scale_local_gradients
    if backward_passes_per_step > 1:
        updating = getattr(wrapped, "inner_optimizer", wrapped)
        updating.gradient_accumulation_steps = backward_passes_per_step
        passes = CountsPasses if average_aggregated_gradients else SumsPasses
        mixins = (OwnUpdates, passes) if stays_out else (passes,)
        if updating is not wrapped:
            type(wrapped).horovod_inner_mixins = mixins
            wrapped._add_inner_mixins()
        else:
            for mixin in mixins:
                put_before(wrapped, mixin)
    return wrapped


@has_parameters_of(DistributedOptimizer, local_layers=None)
def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    *, local_layers: Any, **options: Any
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients, except those of local layers.

    Args:
        local_layers: a layer or a list of layers, the same on all ranks. Weights that
            the layers create later are included.
        **options: the arguments of `DistributedOptimizer`, in the same order;
            `local_layers` is the second-to-last argument.

    Returns:
        The optimizer.

    Raises:
        ValueError: an entry of `local_layers` is not a layer. Also as in
            `DistributedOptimizer`.
        TypeError: as in `DistributedOptimizer`.
    """
    layers = layers_of(local_layers)
    optimizer = DistributedOptimizer(**options)
    for layer in layers:
        optimizer.register_local_var(layer)
    return optimizer
