"""DistributedOptimizer: a Keras optimizer that reduces gradients before it uses them.

The optimizer keeps its object, its state and its class name: only its class becomes a
subclass whose `apply` reduces the gradients over all ranks first. A saved model names
the plain Keras class and loads without tfdist.
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
from tfdist.training.loss_scale import ReducingWithAddedScale
from tfdist.training.optimizer_mixins import Reducing, reducing_class

_WAS_BUILT = "_tfdist_was_built"  # attribute: whether it was when it was wrapped


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
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients over all ranks.

    The optimizer given is changed in place and returned; a built one keeps its slots.
    Wrap it before the first step: what was traced before goes on without a reduction.
    A model that has been trained with the plain optimizer takes notice of the change in
    `fit` with a callback of tfdist, or when it is compiled anew.
    Under the global policy `mixed_float16` it is put into a `LossScaleOptimizer`
    first, because the reduction has to be outside of the loss scale. `fit` uses it; in
    a loop of your own it counts from the first `optimizer.scale_loss(loss)` on, and
    without one gradients are taken as they are.

    Args:
        optimizer: a Keras optimizer, e.g. `keras.optimizers.Adam(1e-3)`.
        op: `ReduceOp.AVERAGE` (default): the gradient of the mean over all ranks;
            `ReduceOp.SUM`.
        name: tells apart two optimizers that reduce equal lists of variables in one
            graph; default: they are told apart by their order. Optimizers that are used
            in different threads need different names.
        process_set: the ranks over which gradients are reduced; default all.
        compression: `"fp16"` or `"bf16"`: float32 and float64 gradients are rounded to
            that type, added in float32, and the result is rounded once more: half the
            bytes (three quarters between hosts with several ranks each), for 11 (fp16)
            or 8 (bf16) significant bits. fp16 ends at 65504: a larger gradient becomes
            infinite. Default: exact.
        sparse_as_dense: how gradients of embeddings (`tf.IndexedSlices`) are reduced:
            `False`: by the rows that a step has used, `True`: as dense tensors.
            Default: by rows for tables of 8 MiB and more. With
            `TFDIST_ATOMIC_STEPS=1` always as dense tensors.
        local_variables: variables and layers that belong to each rank alone (a list, or
            a function that is given a variable and says whether it is one): their
            gradients are not reduced, and they may have other shapes on other ranks.
            With an average they are divided by the number of ranks: the gradient of
            the mean over the ranks' losses. The same ones on all ranks. Default: none.
        nan_policy: what all ranks do together when the gradient of a step is not
            finite on any of them: `"raise"` an error before a variable is changed, or
            `"skip_step"`: variables, slots and the count of steps stay as they are.
            Default: nothing, the step is taken. (A `LossScaleOptimizer` skips such
            steps by itself.)
        xla: what becomes of the reduction in a model with `jit_compile=True`. `"off"`:
            it runs outside of what XLA compiles. `"auto"` (default): inside, where
            `libtfdist_xla.so` is there (`make xla`) and takes it; else outside. Ranks
            of which only some reduce inside get a `MismatchError`.

    With `gradient_accumulation_steps=n` each rank adds up the gradients of n batches,
    and their sum is reduced once, in the n-th step. Where batches differ in size,
    `optimizer.apply(grads, variables, weight=count)` lets each count by its number of
    samples; `apply_gradients` takes `weight` too.

    What a class of your own overrides (`apply`, `apply_gradients`, `update_step`) is
    given the reduced gradients. (With `gradient_accumulation_steps` the first two are
    given those of each batch of this rank, as by Keras.) Arguments of their own are
    passed on, by name.

    Returns:
        The optimizer, for `model.compile(optimizer=...)` or a custom loop.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer (names, e.g. "adam", are not
            accepted: their learning rate would stay hidden).
        ValueError: it is wrapped already, `op` is neither sum nor average,
            `compression`, `nan_policy` or `xla` is not known, a `LossScaleOptimizer`
            gets a policy, or an optimizer with `global_clipnorm` local variables.

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
    )
    return wrap_optimizer(optimizer, options, nan_policy)


def wrap_optimizer(
    optimizer: keras.optimizers.Optimizer,
    options: ReduceOptions,
    nan_policy: str | None = None,
) -> keras.optimizers.Optimizer:
    """`DistributedOptimizer` with all options of a reduction.

    Args:
        optimizer: a Keras optimizer, not wrapped yet; changed in place.
        options: how gradients are reduced.
        nan_policy: None, "raise" or "skip_step".

    Returns:
        The optimizer; under the policy `mixed_float16` in a `LossScaleOptimizer`.

    Raises:
        TypeError: `optimizer` is no Keras optimizer.
        ValueError: it is wrapped already, or the options do not go together.
    """
    _check_wrappable(optimizer)
    if options.local_variables is not None:
        check_clips_each_alone(optimizer)
    check_nan_policy(nan_policy)
    mixin: Any = Reducing
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, name="loss_scale_optimizer"
        )
        mixin = ReducingWithAddedScale
    if nan_policy and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"nan_policy={nan_policy!r} was given with a LossScaleOptimizer "
            "(mixed_float16 brings one), which leaves out every step that is not "
            "finite and halves its scale, on all ranks together. Leave nan_policy out."
        )
    own_class: Any = type(optimizer)
    optimizer.__class__ = reducing_class(own_class, mixin, options, nan_policy)
    vars(optimizer)[_WAS_BUILT] = optimizer.built  # past Keras's __setattr__
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer` came out of `DistributedOptimizer`."""
    return isinstance(optimizer, Reducing)


def may_be_traced_unwrapped(optimizer: Any) -> bool:
    """Whether there may be functions that have it as it was before; asked once."""
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
    else:  # a class of the user's own, or none: its place is not ours to guess
        made = f"{shown}(...)" if optimizer is not None else "optimizer"
    return (
        f"The model was compiled with {shown}, which does not reduce gradients: every "
        "rank would train on its own. Write model.compile(optimizer="
        f"tfdist.DistributedOptimizer({made}), ...)."
    )
