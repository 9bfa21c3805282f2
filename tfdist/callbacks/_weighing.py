"""Losses whose gradients count by the number of samples behind them."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives
from tfdist._process_sets import ProcessSet
from tfdist.collectives import ReduceOp

_BEFORE = "_tfdist_before"  # attribute of a compute_loss that weights


def weigh_losses(model: keras.Model, process_set: ProcessSet | None) -> list[bool]:
    """From now on the gradients of `model.compute_loss` count by samples.

    The value stays as it is; its gradient is multiplied by

        n_r K / (n_1 + ... + n_K)

    on rank r with n_r samples, K ranks that take part in the step. So the average over
    these ranks is the gradient of the mean over all their samples, also where the
    backward pass itself adds up over the ranks (synchronised batch normalisation). Only
    a gradient asks the other ranks: an evaluation does not.

    Args:
        model: what is in `fit`; `take_back` when it ends.
        process_set: the ranks that train; None for all.

    Returns:
        A list that is not empty any more when a gradient has been weighted.
    """
    take_back(model)
    original = model.compute_loss
    seen: list[bool] = []

    @functools.wraps(original)
    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, *rest: Any, **named: Any
    ) -> Any:
        loss = original(x, y, y_pred, *rest, **named)
        batch = next(t for t in keras.tree.flatten([x, y, y_pred]) if t is not None)
        return weighted(loss, samples_of(batch), process_set, seen)

    setattr(compute_loss, _BEFORE, vars(model).get("compute_loss"))
    # Not by setattr: Keras would track it as a part of the model.
    object.__setattr__(model, "compute_loss", compute_loss)
    return seen


def take_back(model: keras.Model) -> bool:
    """Gives a model its own `compute_loss` again, if it has another one.

    Returns:
        Whether it had, so that the train function has to be made anew.
    """
    found = vars(model).get("compute_loss")
    if not hasattr(found, _BEFORE):
        return False
    object.__delattr__(model, "compute_loss")
    before = getattr(found, _BEFORE)
    if before is not None:  # the user had put one onto this very model
        object.__setattr__(model, "compute_loss", before)
    model.train_function = None
    return True


def samples_of(batch: Any) -> tf.Tensor:
    """The length of the first axis, known when the batch is there and not before.

    Where all batches have one length it would be a constant, and a rank that finds the
    end of its data within a step would have told the others of a batch it has not got.
    """
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        return tf.identity(tf.shape(batch)[0])


def weighted(
    loss: tf.Tensor,
    samples: tf.Tensor,
    process_set: ProcessSet | None,
    seen: list[bool],
) -> tf.Tensor:
    """`loss`, with a gradient that counts by `samples`."""

    @tf.custom_gradient
    def same(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            seen[:] = [True]
            own = tf.cast(samples, tf.float64)
            total, ranks = tf.unstack(
                collectives.allreduce(
                    tf.stack([own, tf.ones_like(own)]),
                    op=ReduceOp.SUM,
                    name="uneven_data.weight",
                    process_set=process_set,
                )
            )
            factor = tf.math.divide_no_nan(own * ranks, total)
            return upstream * tf.cast(factor, upstream.dtype)

        return tf.identity(value), gradient

    return same(loss)
