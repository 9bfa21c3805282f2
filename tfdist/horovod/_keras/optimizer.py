"""Horovod's `DistributedOptimizer` for Keras, over tfdist's."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.local_variables import (
    check_clips_each_alone,
    with_local_variable,
)
from tfdist.gradients.options import ReduceOptions
from tfdist.horovod._keras.passes import accumulate, check_passes, put_before
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
    """Mixin of what Horovod's `DistributedOptimizer` returns, before tfdist's class."""

    # Of tfdist's class, and of the one that `DistributedOptimizer` makes for this
    # optimizer and its copies; the last: one of them has local variables.
    tfdist_options: ReduceOptions
    horovod_scale_local_gradients: bool
    horovod_has_local: bool = False

    def register_local_var(self, var: Any) -> None:
        """Makes a variable one of this rank alone: its gradient is not reduced.

        Args:
            var: a variable of Keras or TensorFlow, or a layer for all that it has.
                Call it on all ranks, before the first step.

        Raises:
            TypeError: it is neither.
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
        options = dataclasses.replace(
            self.tfdist_options,
            local_variables=with_local_variable(
                self.tfdist_options.local_variables, var
            ),
            scale_local_gradients=self.horovod_scale_local_gradients,
        )
        type(self).horovod_has_local = True
        # Past Keras's __setattr__, which would track them.
        attributes["tfdist_options"] = options
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            vars(inner)["tfdist_options"] = options

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **named: Any) -> Any:
        """A new optimizer; a configuration knows of no local variables."""
        made = super().from_config(config, *args, **named)  # type: ignore[misc]
        vars(made)["_horovod_asks"] = cls.horovod_has_local
        return made

    def _check_local(self) -> None:
        """Raises if local variables were left behind, which would be averaged.

        Raises:
            RuntimeError: says what to write.
        """
        asks = vars(self).get("_horovod_asks", False)
        if asks and self.tfdist_options.local_variables is None:
            raise RuntimeError(
                f"The optimizer {self.name!r} was made by from_config() of one "  # type: ignore[attr-defined]
                "that has local variables, which a configuration does not hold: their "
                "gradients would be averaged. Call register_local_var(variable) for "
                "each of them on the new optimizer, before the first step; "
                "copy.deepcopy(optimizer) keeps them. If none is to be local, wrap a "
                "new optimizer."
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
        """The optimizer's variables; may also be called, as under Keras 2."""
        listed = super().variables  # type: ignore[misc]
        return listed if isinstance(listed, CallableList) else CallableList(listed)


class OwnSteps:
    """Mixin of the optimizer that is held, on a rank outside of the process set.

    Before tfdist's class, past whose methods it goes to those of Keras's: gradients
    are not reduced, and what is decided is decided by this rank alone.
    """

    # Of tfdist's class.
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
        """Updates the variables; with a weight too, since no other rank counts."""
        del weight
        grads = list(grads)
        variables = self._variables_of(grads, trainable_variables)  # type: ignore[attr-defined]
        grads = gradients_of_this_rank(grads, variables, self.tfdist_options)
        return super(ReducesUpdates, self).apply(grads, variables, **own)  # type: ignore[misc]

    def apply_gradients(
        self, grads_and_vars: Any, *, weight: Any = None, **own: Any
    ) -> Any:
        """As `apply`, from pairs; returns the count of steps."""
        del weight
        super(ReducesUpdates, self).apply_gradients(grads_and_vars, **own)  # type: ignore[misc]
        return self._iterations  # type: ignore[attr-defined]

    def check_finite(self, grads: Any) -> Any:
        """Of `LossScaleOptimizer`: whether a step is taken."""
        return super(ReducesUpdates, self).check_finite(grads)  # type: ignore[misc]


class OwnUpdates:
    """The same, of the one that makes the updates: not even the sum of batches is."""

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

    The optimizer given is changed in place and returned (Horovod returns a copy). It
    keeps its class's name: a saved model names Keras's own, and loads without tfdist.
    What it returns has `register_local_var(var)`: the gradient of that variable is not
    reduced. See `tfdist.DistributedOptimizer`.

    Args:
        optimizer: a Keras optimizer; also a `LossScaleOptimizer` around one.
        name: tells apart optimizers of equal lists of variables; default: their order.
        device_dense: has no meaning here; a warning says so.
        device_sparse: likewise.
        compression: `Compression.none` (default) or `Compression.fp16`, also "bf16".
        sparse_as_dense: True: gradients of embeddings are reduced as dense tensors;
            False: those of tables of 8 MiB and more by the rows in use, smaller ones
            dense, which is faster. The results are equal.
        gradient_predivide_factor: f: gradients are multiplied by 1/f before they are
            added up and by f/size after it; only with `Average`.
        op: `Average` or `Sum`.
        backward_passes_per_step: batches whose gradients are added up before they are
            reduced and applied. `optimizer.iterations` counts batches.
        average_aggregated_gradients: whether their mean is applied, else their sum.
        num_groups: deprecated, `groups`.
        groups: a number of groups of gradients, each reduced in one operation; or a
            list of lists of variables; default: by `TFDIST_BUCKET_BYTES`. The same
            bits come out.
        process_set: the ranks over which gradients are reduced. On other ranks they
            stay those of the rank (those of local variables are divided all the same).
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks.

    Returns:
        The optimizer; under the policy `mixed_float16` a `LossScaleOptimizer` around
        it, which scales in `fit`, and in loops that scale their loss by it.

    Raises:
        TypeError: `optimizer` is no Keras optimizer.
        ValueError: it is wrapped already, or an option is wrong; Adasum;
            `backward_passes_per_step` with a class that overrides `apply_gradients`.
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
            "cast inside of the reduction, where a compressor's own methods are not "
            "called. hvd.DistributedGradientTape calls them."
        )
    check_passes(
        getattr(optimizer, "inner_optimizer", optimizer), backward_passes_per_step
    )
    reduced = dataclasses.replace(
        options.of_tfdist(),
        name=name,
        sparse_as_dense=True if sparse_as_dense else None,
    )
    wrapped = wrap_optimizer(optimizer, reduced)
    stays_out = is_outside(reduced)
    if stays_out:
        put_before(wrapped, OwnSteps)
    put_before(wrapped, Wrapped)
    type(wrapped).horovod_scale_local_gradients = scale_local_gradients
    if backward_passes_per_step > 1:
        if hasattr(wrapped, "inner_optimizer"):
            wrapped._reduce_in_the_inner_one()
        updating = getattr(wrapped, "inner_optimizer", wrapped)
        if stays_out:
            put_before(updating, OwnUpdates)
        accumulate(updating, backward_passes_per_step, average_aggregated_gradients)
    return wrapped


@has_parameters_of(DistributedOptimizer, local_layers=None)
def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    *, local_layers: Any, **options: Any
) -> keras.optimizers.Optimizer:
    """As `DistributedOptimizer`; the weights of some layers stay on their rank.

    Args:
        local_layers: a layer, or a list of layers, the same ones on all ranks, whose
            gradients are not reduced; also of weights that they make later.
        **options: as there, in this order: `local_layers` is the last but one.

    Returns:
        The optimizer.

    Raises:
        ValueError: something in `local_layers` is no layer; and as there.
        TypeError: as there.
    """
    layers = layers_of(local_layers)
    optimizer = DistributedOptimizer(**options)
    for layer in layers:
        optimizer.register_local_var(layer)
    return optimizer
