"""Weights the gradient of a loss by the number of samples in the batch."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import ReduceOp
from tfdist.core.process_sets import ProcessSet

_BEFORE = "_tfdist_before"  # attribute of a compute_loss that applies weights


def weigh_losses(
    model: keras.Model,
    process_set: ProcessSet | None,
    factor_of: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> list[bool]:
    """Makes `model.compute_loss` weight its gradients by the number of samples.

    The value of the loss is unchanged; its gradient is multiplied by

        n_r K / (n_1 + ... + n_K)

    on rank r with n_r samples, if K ranks take part in the step. The average over these
    ranks is then the gradient of the mean over all their samples, even if the backward
    pass itself sums over the ranks (synchronized batch normalization). The ranks
    communicate only when a gradient is computed, not in an evaluation.

    A masked loss of `compile` is a mean over the unmasked elements. It is weighted by
    the number of these elements instead of n_r.

    Args:
        model: the model in `fit`; call `restore_compute_loss` at the end.
        process_set: the ranks that train; None for all.
        factor_of: returns the factor above for n_r; default: the ranks exchange their
            numbers of samples.

    Returns:
        A list that is non-empty once a gradient has been weighted.
    """
    restore_compute_loss(model)
    original = model.compute_loss
    seen: list[bool] = []
    factor_of = factor_of or functools.partial(exchanged_factor, process_set)

    @functools.wraps(original)
    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, *rest: Any, **named: Any
    ) -> Any:
        batch = next(t for t in keras.tree.flatten([x, y, y_pred]) if t is not None)
        samples = samples_of(batch)
        by_elements = functools.partial(
            weighted_by_elements, samples=samples, process_set=process_set
        )
        with _masks_counted(model._compile_loss, by_elements):
            loss = original(x, y, y_pred, *rest, **named)
        return weighted(loss, samples, factor_of, seen)

    setattr(compute_loss, _BEFORE, vars(model).get("compute_loss"))
    # Bypass setattr: Keras would track it as a part of the model.
    object.__setattr__(model, "compute_loss", compute_loss)
    return seen


def restore_compute_loss(model: keras.Model) -> bool:
    """Restores a model's own `compute_loss`, if `weigh_losses` has replaced it.

    Returns:
        Whether `compute_loss` was replaced, so that the train function has to be
        recreated.
    """
    found = vars(model).get("compute_loss")
    if not hasattr(found, _BEFORE):
        return False
    object.__delattr__(model, "compute_loss")
    before = getattr(found, _BEFORE)
    if before is not None:  # the user has set compute_loss on this model object
        object.__setattr__(model, "compute_loss", before)
    model.train_function = None
    return True


def samples_of(batch: Any) -> tf.Tensor:
    """Returns the length of the first axis as a value that depends on the batch.

    If all batches have the same length, `tf.shape` would return a constant. A rank
    whose data end within a step would then send the size of a batch that it does not
    have.
    """
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        return tf.identity(tf.shape(batch)[0])


def weighted(
    loss: tf.Tensor,
    samples: tf.Tensor,
    factor_of: Callable[[tf.Tensor], tf.Tensor],
    seen: list[bool],
) -> tf.Tensor:
    """Returns `loss` with a gradient that is weighted by `samples`."""

    def factor() -> tf.Tensor:
        seen[:] = [True]
        return factor_of(samples)

    return _with_gradient_times(factor, loss)


def exchanged_factor(process_set: ProcessSet | None, samples: tf.Tensor) -> tf.Tensor:
    """Returns n_r K / (n_1 + ... + n_K); the ranks exchange their n_r."""
    own = tf.cast(samples, tf.float64)
    total, ranks = tf.unstack(
        collectives.allreduce(
            tf.stack([own, tf.ones_like(own)]),
            op=ReduceOp.SUM,
            name="UnevenData, samples of a step",
            process_set=process_set,
        )
    )
    return tf.math.divide_no_nan(own * ranks, total)


def weighted_by_elements(
    loss: tf.Tensor,
    elements: tf.Tensor,
    samples: tf.Tensor,
    process_set: ProcessSet | None,
) -> tf.Tensor:
    """Returns `loss` with a gradient weighted by `elements`, as part of a total loss.

    The total loss is weighted by `weighted`. With e_r elements and n_r samples on rank
    r, the gradient is multiplied by

        (e_r / (e_1 + ... + e_K)) / (n_r / (n_1 + ... + n_K))

    The product with the factor of the total loss is e_r K / (e_1 + ... + e_K).

    Args:
        loss: a scalar, the mean over the elements of this rank.
        elements: the number of elements, a scalar; may be 0.
        samples: the number of samples that weights the total, a scalar.
        process_set: the ranks that train; None for all.
    """

    def factor() -> tf.Tensor:
        own = tf.stack([tf.cast(n, tf.float64) for n in (elements, samples)])
        total = collectives.allreduce(
            own,
            op=ReduceOp.SUM,
            name="UnevenData, elements of a step",
            process_set=process_set,
        )
        return tf.math.divide_no_nan(own[0] * total[1], own[1] * total[0])

    return _with_gradient_times(factor, loss)


def _with_gradient_times(factor: Callable[[], tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def same(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return upstream * tf.cast(factor(), upstream.dtype)

        return tf.identity(value), gradient

    return same(loss)


@contextlib.contextmanager
def _masks_counted(
    compile_loss: Any, weigh: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """Wraps the losses of `compile`, also those built later, in `_MaskedLoss`."""
    if compile_loss is None:
        yield
        return
    plain: list[Any] = []

    def replace() -> None:
        plain[:] = compile_loss._flat_losses
        compile_loss._flat_losses = [
            one._replace(loss=_MaskedLoss(one.loss, weigh))
            # A custom `__call__` may divide by any number.
            if type(one.loss).__call__ is keras.losses.Loss.__call__
            else one
            for one in plain
        ]

    def build(y_true: Any, y_pred: Any) -> None:
        type(compile_loss).build(compile_loss, y_true, y_pred)
        replace()

    if compile_loss.built:
        replace()
    compile_loss.build = build
    try:
        yield
    finally:
        del compile_loss.build
        if plain:
            compile_loss._flat_losses = plain


class _MaskedLoss(keras.losses.Loss):
    """Wraps a loss and weights it by the number of elements that its masks keep.

    The masks are the mask of the output and the mask that the loss sets on its values
    (`ignore_class`). An element is included if both masks keep it.

    Args:
        loss: the wrapped loss.
        weigh: function that is called with the value and the number of elements, and
            returns the weighted value.
    """

    def __init__(
        self,
        loss: keras.losses.Loss,
        weigh: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> None:
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self._loss = loss
        self._weigh = weigh
        self._masks: list[Any] = []

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self._masks = _masks_of(y_pred)
        value = super().__call__(y_true, y_pred, sample_weight)
        if not self._masks:
            return value
        mask = functools.reduce(operator.and_, self._masks)
        return self._weigh(value, tf.reduce_sum(tf.cast(mask, tf.float64)))

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the values of the loss, and stores their masks."""
        values = self._loss.call(y_true, y_pred)
        if len(values.shape) == 0:  # a mean, which Keras does not mask
            self._masks = []
        else:
            self._masks = self._masks + _masks_of(values)
        return values


def _masks_of(tensor: Any) -> list[Any]:
    mask = getattr(tensor, "_keras_mask", None)
    return [] if mask is None else [mask]
