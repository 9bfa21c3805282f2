"""Weights the gradients of batches of unequal size to get the mean over all samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.core.process_sets import ProcessSet
from tfdist.core.registry import WeakRegistry

# Variable of a model with synchronized batch normalization → weak reference to such a
# layer, which sums over the ranks in the backward pass while it is trainable.
synchronized_by: WeakRegistry[weakref.ref[Any]] = WeakRegistry()
# Name of the allreduce of the weights in eager mode. If only some ranks pass a weight,
# the error shows this name, because the remaining ranks do not call the allreduce.
EAGER_NAME = "weight= (of all ranks or of none)"


def share_of(
    weight: Any, process_set: ProcessSet | None = None, name: str | None = None
) -> tf.Tensor:
    """Returns this rank's share of the weights of all ranks: w_r / (w_0 + w_1 + ...).

    Let g_r be the gradient of the mean over the w_r samples of rank r. The sum of
    share_of(w_r) * g_r over the ranks is then the gradient of the mean over all
    samples. The ranks sum the weights with one small allreduce. It does not depend on
    the gradients, so it can complete before the backward pass ends.

    Args:
        weight: this rank's number of samples or sum of sample weights, as a number or a
            scalar tensor; finite and >= 0, and 0 for a rank without data.
        process_set: the ranks that take part; default: all ranks.
        name: name of the gradient list (`ReduceOptions.name`); default: no name.

    Returns:
        Scalar float64 tensor between 0 and 1; 0 on all ranks if all weights are 0.

    Raises:
        ValueError: `weight` is not a scalar.
        tf.errors.InvalidArgumentError: a rank's weight is negative or not finite. All
            ranks raise it.

    Example:
        >>> import tfdist
        >>> from tfdist.gradients.sample_weights import share_of
        >>> tfdist.init()
        >>> float(share_of(8))
        1.0
    """
    own = exact(weight)
    is_valid = tf.logical_and(tf.math.is_finite(own), own >= 0)
    valid = tf.where(is_valid, own, 0.0)
    # Summed together with the weights, so that all ranks raise and no rank waits for a
    # rank that has raised.
    bad = tf.where(is_valid, tf.constant(0.0, tf.float64), 1.0)
    # The default name of eager calls, "allreduce.eager", would be unclear in errors.
    unnamed = EAGER_NAME if tf.executing_eagerly() else None
    total, bad_ranks = tf.unstack(
        collectives.allreduce(
            tf.stack([valid, bad]),
            op=collectives.ReduceOp.SUM,
            name=unnamed if name is None else f"{name}.weight",
            process_set=process_set,
        )
    )
    check = tf.debugging.Assert(
        bad_ranks == 0,
        [
            "the weight of a batch has to be finite and at least 0; number of ranks "
            "with invalid weights:",
            bad_ranks,
            "weight on this rank:",
            own,
        ],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.math.divide_no_nan(valid, total)


def exact(weight: Any) -> tf.Tensor:
    """Converts a weight to a float64 scalar.

    Raises:
        ValueError: `weight` is not a scalar.
    """
    # TensorFlow would convert a Python number to float32 first.
    number = weight if tf.is_tensor(weight) else np.asarray(weight, np.float64)
    own = tf.cast(number, tf.float64)
    if own.shape.rank != 0:
        raise ValueError(
            "Expected weight to be a single number, this rank's number of samples, got "
            f"a tensor of shape {own.shape}. For sample weights, pass their sum: "
            "weight=tf.reduce_sum(sample_weight)."
        )
    return own


def weighted_outputs(target: Any, output_gradients: Any, share: tf.Tensor) -> Any:
    """Returns the output gradients for a backward pass with weighted gradients.

    Args:
        target: tensor or structure of tensors to differentiate.
        output_gradients: one gradient for each target; None: ones.
        share: result of `share_of`.

    Returns:
        `output_gradients` times the share, in the structure of `target`.
    """
    if output_gradients is None:
        output_gradients = tf.nest.map_structure(tf.ones_like, target)
    return tf.nest.map_structure(lambda g: weighted(g, share), output_gradients)


def as_targets_hold(share: tf.Tensor, target: Any) -> tf.Tensor:
    """Rounds the share to bfloat16 or float16 if a target has that dtype.

    The targets can represent the rounded share exactly, so a backward pass that starts
    with it is exact. The gradients, whose dtypes may be wider, can then be multiplied
    by the remaining factor, the share divided by the rounded share.

    Args:
        share: result of `share_of`.
        target: tensor or structure of tensors to differentiate.
    """
    held = share
    for dtype in (tf.bfloat16, tf.float16):
        if any(getattr(t, "dtype", None) == dtype for t in tf.nest.flatten(target)):
            held = tf.cast(tf.cast(held, dtype), share.dtype)
    return held


def check_weightable(variables: Iterable[Any]) -> None:
    """Raises if weights cannot be applied to gradients after the backward pass.

    Synchronized batch normalization sums gradients over the ranks in the backward pass,
    so weights have to be applied before the backward pass.

    Raises:
        ValueError: a variable belongs to a model with such a layer, and the layer is
            trainable. The message says how to apply the weights.
    """
    for variable in variables:
        layer = synchronized_by.get(variable, lambda: None)()
        if layer is not None and layer.trainable:
            raise ValueError(
                f"weight cannot be used for {getattr(variable, 'path', variable.name)}"
                ": a synchronized batch normalization layer sums the ranks' gradients "
                "in the backward pass, before they can be weighted. Pass the weight to "
                "DistributedGradientTape.gradient(). Or divide the sum of each rank's "
                "losses by the number of samples on all ranks, and reduce with "
                "op=tfdist.ReduceOp.SUM."
            )


def weighted(grad: Any, share: tf.Tensor) -> Any:
    """Returns a gradient times this rank's share.

    The product of a float16 or bfloat16 gradient is computed in float32.

    Args:
        grad: tensor, `tf.IndexedSlices` or `None`.
        share: result of `share_of`.
    """
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = weighted(grad.values, share)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    wide = tf.float32 if grad.dtype in (tf.float16, tf.bfloat16) else grad.dtype
    # On a rank without samples the mean is NaN; multiplying by 0 has to give 0.
    product = tf.math.multiply_no_nan(tf.cast(grad, wide), tf.cast(share, wide))
    return tf.cast(product, grad.dtype)
