"""DistributedOptimizer: a Keras optimizer that reduces gradients before it uses them.

The optimizer keeps its object, its state and its class name: only its class becomes a
subclass whose `apply` reduces the gradients over all ranks first. `apply` is the one
entry for gradients in Keras 3, before unscaling, clipping and weight decay, so these
all see what one process with the whole batch would see. A saved model names the plain
Keras class and loads without tfdist.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
import tensorflow as tf

from tfdist import _core, groups
from tfdist._process_sets import ProcessSet, id_of
from tfdist.collectives import ReduceOp
from tfdist.compression import check_compression

_logger = logging.getLogger("tfdist")


class _Reducing:
    """Mixin before an optimizer's own class: reduces, then applies."""

    # Of the optimizer's own class.
    built: bool
    _trainable_variables: list[Any]

    # Class attributes, so that a copy made by from_config() reduces likewise.
    _tfdist_op: ReduceOp
    _tfdist_name: str | None
    _tfdist_set: ProcessSet | None
    _tfdist_compression: str | None

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduces `grads` over all ranks, then updates the variables."""
        _check_accumulation(self)
        grads = list(grads)
        if grads:
            variables = self._variables_of(grads, trainable_variables)
            grads = groups.reduce_gradients(
                grads,
                variables,
                op=self._tfdist_op,
                name=self._tfdist_name,
                process_set=self._tfdist_set,
                compression=self._tfdist_compression,
            )
            if groups.gated():
                # Not even the count of steps may change in a step that fails.
                with tf.control_dependencies([g for g in grads if g is not None]):
                    return super().apply(grads, trainable_variables)  # type: ignore[misc]
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _variables_of(self, grads: list[Any], variables: Any) -> list[Any]:
        if variables is not None:
            return list(variables)
        if not self.built:
            raise ValueError(
                "apply() was called with gradients but without variables on an "
                "optimizer that is not built. Pass the variables, or call "
                "optimizer.build(model.trainable_variables) first."
            )
        return list(self._trainable_variables)

    def save_own_variables(self, store: Any) -> None:
        """Saves the state; refused when the weights are torn."""
        check_not_torn()
        super().save_own_variables(store)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """The plain optimizer's configuration; refused when the weights are torn."""
        check_not_torn()  # the HDF5 format saves by this and `variables` alone
        return super().get_config()  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which gives the plain class.
        rebuild: Any
        rebuild, arguments = tuple(self.__reduce__())[:2]
        copied = rebuild(*arguments)
        copied.__class__ = type(self)
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer(inner) sets inner.loss_scale_factor to None. If it wraps
        # a reducing optimizer, a rank with a non-finite gradient skips the reduction
        # that the others wait for. (`built` is set by the constructor, after it.)
        if name == "loss_scale_factor" and value is None and "built" in vars(self):
            raise ValueError(
                "A LossScaleOptimizer was put around a tfdist optimizer (model.compile "
                "does it for a model of the mixed_float16 policy). The reduction has "
                "to be outside: write tfdist.DistributedOptimizer("
                "keras.optimizers.LossScaleOptimizer(optimizer)), or set the policy "
                "with keras.config.set_dtype_policy('mixed_float16') before you wrap."
            )
        super().__setattr__(name, value)


def DistributedOptimizer(  # noqa: N802 - named like the class it stands for
    optimizer: keras.optimizers.Optimizer,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    compression: str | None = None,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer reduce its gradients over all ranks.

    The optimizer given is changed in place and returned; a built one keeps its slots.
    Under the global policy `mixed_float16` it is put into a `LossScaleOptimizer`
    first, because the reduction has to be outside of the loss scale.

    Args:
        optimizer: a Keras optimizer, e.g. `keras.optimizers.Adam(1e-3)`.
        op: `ReduceOp.AVERAGE` (default): the gradient of the mean over all ranks;
            `ReduceOp.SUM`.
        name: tells apart two optimizers that reduce equal lists of variables in one
            graph; default: they are told apart by their order.
        process_set: the ranks over which gradients are reduced; default all.
        compression: `"fp16"` or `"bf16"`: float32 and float64 gradients are rounded to
            that type, added in float32, and the result is rounded once more: half the
            bytes between the ranks, for 11 (fp16) or 8 (bf16) significant bits. fp16
            ends at 65504: a larger gradient becomes infinite. Default: exact.

    Returns:
        The optimizer, for `model.compile(optimizer=...)` or a custom loop.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer (names, e.g. "adam", are not
            accepted: their learning rate would stay hidden).
        ValueError: it is wrapped already, `op` is neither sum nor average, or
            `compression` is not known.
        NotImplementedError: it accumulates gradients.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(
        ...     optimizer=tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        ...     loss="mse", jit_compile=False)
    """
    _check_wrappable(optimizer, op)
    check_compression(compression)
    id_of(process_set)  # one that has ended is refused here
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, name="loss_scale_optimizer"
        )
    own_class: Any = type(optimizer)
    optimizer.__class__ = _reducing_class(
        own_class, ReduceOp(op), name, process_set, compression
    )
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer` came out of `DistributedOptimizer`."""
    return isinstance(optimizer, _Reducing)


def check_not_torn() -> None:
    """Raises if an aborted step may have changed some of the weights.

    With `TFDIST_COMMIT_GATE=1` and a verdict of the ranks no step is torn: the weights
    are those after the committed step, on every surviving rank.

    Raises:
        RuntimeError: names the last good step and the failure.
    """
    failure = _core.failure()
    if failure is None:
        return
    committed = failure.payload.get("committed_step")
    if committed is not None:
        _logger.info("The weights are whole: those after step %d.", committed)
        return
    raise RuntimeError(
        "The weights are torn: a step was aborted when some variables may already "
        f"have been updated ({failure.message}). The last good step is "
        f"{_core.good_steps()}, counted from tfdist.init(). Saving is refused: go back "
        "to the last checkpoint."
    )


@functools.cache
def _reducing_class(
    cls: Any,
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet | None,
    compression: str | None,
) -> Any:
    """The reducing subclass of an optimizer class, under the class's own name."""
    is_public = getattr(keras.optimizers, cls.__name__, None) is cls
    return type(
        cls.__name__,
        (_Reducing, cls),
        {
            "__module__": "keras.optimizers" if is_public else cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_tfdist_op": op,
            "_tfdist_name": name,
            "_tfdist_set": process_set,
            "_tfdist_compression": compression,
        },
    )


def _check_wrappable(optimizer: Any, op: ReduceOp) -> None:
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
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"Expected op=tfdist.ReduceOp.AVERAGE or SUM, got {op!r}.")
    _check_accumulation(optimizer)


def _check_accumulation(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = inner.gradient_accumulation_steps
    if steps:
        raise NotImplementedError(
            f"gradient_accumulation_steps={steps} is not supported by "
            "DistributedOptimizer in this release. Use a larger batch or more ranks, "
            "or accumulate in a custom loop with tf.GradientTape and reduce the sum "
            "with tfdist.grouped_allreduce()."
        )


def unwrapped_message(optimizer: Any) -> str:
    """What to write when a model's optimizer does not reduce its gradients."""
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
