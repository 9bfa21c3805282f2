"""Recomputes the statistics of batch normalization, for fixed weights.

Moving statistics are averages over steps in which the weights were changing. In
training with few steps and high learning rates, they lag behind the weights. Here the
weights do not change: the means and variances of several batches are combined over
batches and ranks by the law of total variance.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.core.process_sets import ProcessSet
from tfdist.layers.statistics import combine_at
from tfdist.layers.synchronized import batch_normalizations, uses_renorm


def estimate_moving_statistics(
    model: keras.Model,
    data: Iterable[Any],
    *,
    steps: int | None = None,
    process_set: ProcessSet | None = None,
) -> int:
    """Recomputes the moving statistics of batch normalization from given batches.

    The model is called with `training=True` (with dropout, if it has any) for each
    batch, and the mean and variance of every layer's inputs are combined over the
    batches and the ranks, weighted by the number of samples. Weights and all other
    states of the model stay unchanged. Call this function after training, before the
    model is evaluated or saved, with batches as in training.

    All ranks have to call this function. With synchronized layers, all ranks need the
    same number of batches.

    Args:
        model: a built Keras model. Layers that are frozen, or that the model does not
            call, keep their statistics.
        data: batches of this rank, for example a `tf.data.Dataset`: inputs, or tuples
            (inputs, targets, ...) of which only the inputs are used. Images must have
            the same size in all batches.
        steps: number of batches to use; default: until `data` ends.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Number of built layers that are not frozen.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: `steps` is below 1, the model is not built, or no rank has a batch.
        NotImplementedError: a layer has `renorm=True`, with which outputs in training
            depend on earlier batches (`renorm_mean`, `renorm_stddev`), or is called
            several times in a step.
        tfdist.MismatchError: the ranks' layers differ.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)),
        ...                           keras.layers.BatchNormalization()])
        >>> data = [np.full((2, 4), 1.0), np.full((2, 4), 3.0)]
        >>> tfdist.layers.estimate_moving_statistics(model, data)
        1
        >>> layer = model.layers[0]
        >>> float(layer.moving_mean[0]), float(layer.moving_variance[0])
        (2.0, 1.0)

    References:
        Wu & Johnson, Rethinking "Batch" in BatchNorm, 2021, section 3 (PreciseBN)
        (arXiv:2105.07576).
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a Keras model, got {type(model).__name__}: {model}.")
    if steps is not None and not steps >= 1:
        raise ValueError(f"Expected steps to be at least 1 or None, got {steps!r}.")
    if not model.built:
        raise ValueError(
            f"Expected a built model, but {model.name!r} is not built. Call "
            "model.build(input_shape) or train it first."
        )
    found = batch_normalizations(model)
    layers = [layer for layer in found if layer.trainable and layer.built]
    for layer in layers:
        if uses_renorm(layer):
            raise NotImplementedError(
                f"{layer.path} has renorm=True, so its outputs in training depend on "
                "earlier batches. Use tfdist.layers.combine_moving_statistics."
            )
    with _statistics_of_one_batch(model, layers) as calls:
        samples, moments = _measure(model, layers, data, steps, calls)
    for one, layer in zip(moments, layers, strict=True):
        if one.count:
            layer.moving_mean.assign(one.mean)
            layer.moving_variance.assign(one.variance)
    where = "in estimate_moving_statistics"
    try:
        combine_at(where, model, samples, process_set, layers=layers)
    except ValueError as error:  # on all ranks
        raise ValueError(
            "Expected data with at least one batch on at least one rank, got none."
        ) from error
    return len(layers)


def _measure(
    model: keras.Model,
    layers: list[Any],
    data: Iterable[Any],
    steps: int | None,
    calls: dict[int, int],
) -> tuple[int, list[_Moments]]:
    """Returns the number of samples, and mean and variance of each layer's inputs."""

    @tf.function(jit_compile=False, autograph=False, reduce_retracing=True)
    def run(inputs: Any) -> None:
        calls.clear()
        model(inputs, training=True)
        for layer in layers:
            if calls.get(id(layer), 0) > 1:
                raise NotImplementedError(
                    f"{layer.path} is called several times in a step, so its moving "
                    "statistics are those of all calls. Use "
                    "tfdist.layers.combine_moving_statistics."
                )

    samples, moments = 0, [_Moments() for _ in layers]
    for batch in itertools.islice(data, steps):
        inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        run(inputs)
        count = int(tf.shape(tf.nest.flatten(inputs)[0])[0])
        samples += count
        for one, layer in zip(moments, layers, strict=True):
            if id(layer) in calls:
                one.add(count, layer.moving_mean, layer.moving_variance)
    return samples, moments


class _Moments:
    """Mean and variance of the inputs of a layer, over the batches so far."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self.variance: Any = 0.0

    def add(self, count: int, mean: Any, variance: Any) -> None:
        """Adds a batch of `count` samples with the given mean and variance."""
        if count == 0:
            return
        self.count += count
        share = count / self.count
        change = np.asarray(mean.numpy(), np.float64) - self.mean
        self.mean = self.mean + share * change
        self.variance = (
            (1 - share) * self.variance
            + share * np.asarray(variance.numpy(), np.float64)
            + share * (1 - share) * change**2
        )


@contextlib.contextmanager
def _statistics_of_one_batch(
    model: keras.Model, layers: list[Any]
) -> Iterator[dict[int, int]]:
    """Makes moving statistics equal those of the last batch; yields counts of calls.

    At the end, all variables get their earlier values again.
    """
    values = [(v, v.numpy()) for v in model.variables]
    momenta = [layer.momentum for layer in layers]
    calls: dict[int, int] = {}
    try:
        for layer in layers:
            layer.momentum = 0.0
            # A value that is not finite would persist: its product with 0 is NaN.
            layer.moving_mean.assign(tf.zeros_like(layer.moving_mean))
            layer.moving_variance.assign(tf.ones_like(layer.moving_variance))
            object.__setattr__(layer, "call", _counted(layer, calls))
        yield calls
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            vars(layer).pop("call", None)
        for variable, value in values:
            variable.assign(value)


def _counted(layer: Any, calls: dict[int, int]) -> Any:
    """Returns a layer's `call`, wrapped such that it counts its calls."""
    call = layer.call

    @functools.wraps(call)
    def counted(*arguments: Any, **options: Any) -> Any:
        calls.update({id(layer): calls.get(id(layer), 0) + 1})
        return call(*arguments, **options)

    return counted
