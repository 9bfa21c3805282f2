"""DistributedOptimizer: a Keras optimizer that reduces gradients over all ranks.

The object and its state stay the same; only its class is replaced with a subclass of
the same name, whose `apply` reduces the gradients first. A saved model contains the
name of the plain Keras class and loads without tfdist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdist.collectives import ReduceOp
from tfdist.collectives.local_variables import LocalVariables, check_clips_each_alone
from tfdist.core.process_sets import ProcessSet
from tfdist.gradients.nan_policy import check_nan_policy
from tfdist.gradients.options import ReduceOptions
from tfdist.training import double_buffering as buffering
from tfdist.training.adasum import WITH_ADASUM
from tfdist.training.loss_scale import ReducingWithAddedScale
from tfdist.training.optimizer_mixins import (
    Reducing,
    note_accumulators_of,
    reducing_class,
)

_WAS_BUILT = "_tfdist_was_built"  # attribute: True if built before wrapping


def DistributedOptimizer(  # noqa: N802 - named like the class it stands for
    optimizer: keras.optimizers.Optimizer,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    compression: str | None = None,
    sparse_as_dense: bool | None = None,
    local_variables: Iterable[Any] | Callable[[Any], bool] | None = None,
    nan_policy: str | None = None,
    xla: str = "auto",
    double_buffering: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients over all ranks.

    The optimizer is changed in place and returned; if it is built, it keeps its slots.
    Wrap it before the first step: functions traced earlier keep using the unwrapped
    optimizer. A model that was trained with the plain optimizer uses the wrapped one
    after it is compiled again, or in a call of `fit` with a tfdist callback.

    Under the global policy `mixed_float16`, the optimizer is first wrapped in a
    `LossScaleOptimizer`, because gradients have to be reduced before they are unscaled.
    `fit` scales the loss. In a custom loop, the scale takes effect with the first
    `optimizer.scale_loss(loss)`; until then, gradients are used unchanged.

    Args:
        optimizer: a Keras optimizer, e.g. `keras.optimizers.Adam(1e-3)`.
        op: `ReduceOp.AVERAGE` (default): the gradient of the mean over all ranks;
            `ReduceOp.SUM`; or `ReduceOp.ADASUM`: every rank takes the step of this
            optimizer with its own gradients, and the changes of the weights are
            combined by Adasum (see docs/adasum.md). The optimizer's slots then
            differ between ranks, and a checkpoint contains those of rank 0. The number
            of ranks has to be a power of two.
        name: distinguishes optimizers that reduce equal lists of variables in one
            graph; default: they are distinguished by their order. Optimizers that are
            used in different threads need different names.
        process_set: the ranks over which gradients are reduced; default all.
        compression: `"fp16"` or `"bf16"`. Float32 and float64 gradients are rounded to
            that type and summed in float32, and the result is rounded once more. For
            float32 gradients, this halves the bytes that are sent. Between hosts with
            several ranks each, and with ADASUM, it saves only a quarter of the bytes.
            Gradients keep 11 (fp16) or 8 (bf16) significant bits. The largest fp16
            number is 65504; a larger gradient becomes infinite. Default: no
            compression.
        sparse_as_dense: whether gradients of embeddings (`tf.IndexedSlices`) are
            reduced as dense tensors. With `False`, only the rows that a step has used
            are reduced. Default: by rows for embedding tables of 8 MiB or more, except
            in a loop over an elastic `State`. With ADASUM, `double_buffering` or
            `TFDIST_ATOMIC_STEPS=1`, embedding gradients are always reduced as dense
            tensors.
        local_variables: variables and layers that each rank trains on its own: a list,
            or a function that accepts a variable and returns a bool. All ranks have to
            select the same variables. Their gradients are not reduced, and their shapes
            may differ between ranks. With `ReduceOp.AVERAGE`, each rank divides these
            gradients by the number of ranks, which gives the gradient of the mean over
            the ranks' losses. Default: none.
        nan_policy: action on all ranks if a gradient is NaN or infinite on at least one
            rank. `"raise"` raises an error before any variable is changed.
            `"skip_step"` leaves variables, slots and the step count unchanged. Default:
            the step is taken. A `LossScaleOptimizer` always skips such steps. With
            `gradient_accumulation_steps`, a batch is skipped; if only the reduced sum
            of the batches is not finite, all of them are skipped.
        xla: where gradients are reduced in a model with `jit_compile=True`. With
            `"auto"` (default) they are reduced inside the part that XLA compiles, if
            `libtfdist_xla.so` (`make xla`) is available and supports the reduction,
            otherwise outside. With `"off"` they are always reduced outside. If only
            some ranks reduce inside, all ranks raise `MismatchError`.
        double_buffering: whether each step updates the weights with the reduced
            gradients of the previous step, so that the reduction runs during the
            forward and the backward pass. The first step changes no weights, and the
            gradients of the last one are not used. Meant for slow networks; use a
            learning-rate warm-up, and a lower rate if the loss oscillates (see
            docs/slow-networks.md). Default: False.

    With `gradient_accumulation_steps=n` each rank accumulates the gradients of n
    batches, and their sum is reduced once, in the n-th step. If batches differ in size,
    `optimizer.apply(grads, variables, weight=count)` weights each batch by its number
    of samples; `apply_gradients` also accepts `weight`.

    Methods that a custom class overrides (`apply`, `apply_gradients`, `update_step`)
    get the reduced gradients; with ADASUM, this rank's own gradients. With
    `gradient_accumulation_steps`, `apply` and `apply_gradients` get this rank's
    gradients of each batch, as in Keras. Additional keyword arguments are passed on.

    Returns:
        The optimizer, for `model.compile(optimizer=...)` or a custom loop.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer. Names such as "adam" are not
            accepted, because they do not show the learning rate. Or `name` is not a
            string.
        ValueError: `optimizer` is already wrapped; an option is invalid; or options are
            incompatible: ADASUM with this number of ranks, `compression="fp16"` or
            `sparse_as_dense=False`; `nan_policy` with a `LossScaleOptimizer`;
            `local_variables` with `global_clipnorm`; or `double_buffering` with ADASUM,
            `local_variables`, `sparse_as_dense=False`, `gradient_accumulation_steps` or
            a `LossScaleOptimizer`. An optimizer that ADASUM does not support raises
            this error in the first step.
        NotImplementedError: ADASUM or `double_buffering` is used in an elastic job.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(
        ...     optimizer=tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        ...     loss="mse", jit_compile=False)
    """
    options = ReduceOptions(
        op,
        name=name,
        process_set=process_set,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        local_variables=None
        if local_variables is None
        else LocalVariables(local_variables),
        xla=xla,
        double_buffering=double_buffering,
    )
    return wrap_optimizer(optimizer, options, nan_policy)


def wrap_optimizer(
    optimizer: keras.optimizers.Optimizer,
    options: ReduceOptions,
    nan_policy: str | None = None,
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer like `DistributedOptimizer`, with all reduction options.

    Args:
        optimizer: a Keras optimizer that is not wrapped yet; changed in place.
        options: options of the reduction.
        nan_policy: None, "raise" or "skip_step".

    Returns:
        The optimizer; under the policy `mixed_float16` in a `LossScaleOptimizer`.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer.
        ValueError: `optimizer` is already wrapped, or the options are incompatible.
    """
    _check_wrappable(optimizer)
    if options.local_variables is not None:
        check_clips_each_alone(optimizer)
    check_nan_policy(nan_policy)
    mixin: Any = Reducing
    if options.double_buffering:
        buffering.check_wrappable(optimizer)
        mixin = buffering.ReducingPrevious
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, name="loss_scale_optimizer"
        )
        mixin = ReducingWithAddedScale
    if options.op is ReduceOp.ADASUM:
        if options.compression == "fp16":
            raise ValueError(
                "compression='fp16' cannot be used with DistributedOptimizer(op="
                "tfdist.ReduceOp.ADASUM), which sends changes of the weights: small "
                "ones would become 0. Use compression='bf16', or none."
            )
        mixin = WITH_ADASUM[mixin]
    if nan_policy and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"nan_policy={nan_policy!r} was given with a LossScaleOptimizer "
            "(mixed_float16 adds one), which skips every step with non-finite "
            "gradients and halves its scale, on all ranks. Omit nan_policy."
        )
    own_class: Any = type(optimizer)
    optimizer.__class__ = reducing_class(own_class, mixin, options, nan_policy)
    note_accumulators_of(optimizer)
    vars(optimizer)[_WAS_BUILT] = optimizer.built  # bypasses Keras's __setattr__
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Returns whether `optimizer` was wrapped by `DistributedOptimizer`."""
    return isinstance(optimizer, Reducing)


def may_be_traced_unwrapped(optimizer: Any) -> bool:
    """Returns True once if functions may have traced the unwrapped optimizer."""
    return bool(vars(optimizer).pop(_WAS_BUILT, False))


def _check_wrappable(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "Expected a Keras optimizer, e.g. keras.optimizers.SGD(0.1), got "
            f"{type(optimizer).__name__}: {optimizer!r}."
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(optimizer) or is_distributed(inner):
        raise ValueError(
            f"The optimizer {optimizer.name!r} is already wrapped by "
            "DistributedOptimizer: its gradients would be reduced twice. Wrap it once."
        )


def unwrapped_message(optimizer: Any) -> str:
    """Returns the error message for an optimizer that does not reduce gradients."""
    cls = type(optimizer)
    shown = cls.__name__ if optimizer is not None else "no optimizer"
    if getattr(keras.optimizers, cls.__name__, None) is cls:
        made = f"keras.optimizers.{shown}(...)"
    else:  # a custom class, whose module is unknown, or no optimizer
        made = f"{shown}(...)" if optimizer is not None else "optimizer"
    return (
        f"The model was compiled with {shown}, which does not reduce gradients: every "
        "rank would train independently. Use model.compile(optimizer="
        f"tfdist.DistributedOptimizer({made}), ...)."
    )
