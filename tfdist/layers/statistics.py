"""Combines the moving statistics of plain batch normalization over the ranks.

Each rank updates its layers with its own batches only, so moving means and variances
differ between ranks. A model that is evaluated or saved needs one mean and variance for
each layer, computed from the data of all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.collectives import ReduceOp
from tfdist.collectives.objects import gather_from_all
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.layers.synchronized import batch_normalizations, uses_renorm


def combine_moving_statistics(
    model: keras.layers.Layer,
    *,
    weight: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Combines the moving statistics of batch normalization over all ranks.

    Let `w[r]` be the weight of rank `r` divided by the sum of all weights. By the law
    of total variance, the combined mean is `sum w[r] mean[r]`, and the combined
    variance is `sum w[r] (variance[r] + (mean[r] - mean)^2)`, i.e. the mean of the
    ranks' variances plus the variance of their means. Both are computed in float64.
    Float32 statistics that are equal on all ranks (of a synchronized or frozen layer)
    therefore stay bitwise identical.

    All ranks have to call this function. Training can continue afterwards: every rank
    starts from the combined statistics and updates them with its own batches. Training
    does not use moving statistics, so combining them has no effect on training. With
    `renorm=True`, training uses additional statistics (`renorm_mean`, `renorm_stddev`),
    which are not changed.

    Args:
        model: a model or layer; layers that are not built are ignored.
        weight: weight of this rank's data, for example its batch size if batch sizes
            differ between ranks; default 1.0, the same for all ranks.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        Number of layers whose statistics were combined.

    Raises:
        TypeError: `model` is not a Keras layer.
        ValueError: a rank's weight is negative or not finite, or all weights are 0. All
            ranks raise it.
        tfdist.MismatchError: the ranks' layers differ, or a rank has joined
            (`tfdist.join`). All ranks that call the function raise it.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)),
        ...                           keras.layers.BatchNormalization()])
        >>> tfdist.layers.combine_moving_statistics(model)
        1

    References:
        Chan, Golub & LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
        Sample Variances, COMPSTAT 1982, section 2.
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"Expected a Keras model or layer, got {type(model).__name__}: {model!r}."
        )
    return combine_at("in combine_moving_statistics", model, weight, process_set)


def combine_at(
    where: str,
    model: keras.layers.Layer,
    weight: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    layers: list[Any] | None = None,
) -> int:
    """Runs `combine_moving_statistics`; checks that `where` is equal on all ranks.

    Args:
        where: where the function is called, e.g. "to save a checkpoint".
        model: as in `combine_moving_statistics`.
        weight: as in `combine_moving_statistics`.
        process_set: as in `combine_moving_statistics`.
        layers: the layers whose statistics are combined; default: all that are built.
    """
    if layers is None:
        layers = [layer for layer in batch_normalizations(model) if layer.built]
    own = {
        "where": where,
        "layers": [
            f"{layer.path} {layer.moving_mean.shape} renorm={uses_renorm(layer)}"
            for layer in layers
        ],
        "weight": float(weight),
    }
    shared = gather_from_all(
        own,
        "combine_moving_statistics",
        name="combine_moving_statistics",
        process_set=process_set,
    )
    share = _share(own, shared, list(members_of(process_set)))
    if not layers or len(shared) == 1:
        return len(layers)  # nothing to combine
    pairs = [pair for layer in layers for pair in _pairs(layer)]
    means = _flat([mean for mean, _, _ in pairs])
    variances = _flat([spread for _, spread, _ in pairs])
    is_deviation = np.concatenate([np.full(m.shape, d) for m, _, d in pairs])
    variances[is_deviation] **= 2
    mean, variance = total_moments(
        share, means, variances, lambda part: _sum(part, process_set)
    )
    variance[is_deviation] **= 0.5
    position = 0
    for mean_variable, spread_variable, _ in pairs:
        end = position + mean_variable.shape[0]
        mean_variable.assign(mean[position:end])
        spread_variable.assign(variance[position:end])
        position = end
    return len(layers)


def total_moments(
    share: float, mean: np.ndarray, variance: np.ndarray, sum_over_ranks: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and variance of all ranks' data, by the law of total variance.

    Args:
        share: this rank's share of the data, 0 to 1.
        mean: mean of this rank's data, float64.
        variance: variance of this rank's data, float64.
        sum_over_ranks: function that sums an array over the ranks.

    Returns:
        Mean and variance, equal on all ranks.
    """
    total = sum_over_ranks(share * mean)
    return total, sum_over_ranks(share * (variance + (mean - total) ** 2))


def _pairs(layer: Any) -> list[tuple[Any, Any, bool]]:
    """Returns triples (mean, variance or deviation, whether it is the deviation)."""
    pairs = [(layer.moving_mean, layer.moving_variance, False)]
    if uses_renorm(layer):
        pairs.append((layer.moving_mean, layer.moving_stddev, True))
    return pairs


def _flat(variables: list[Any]) -> np.ndarray:
    values = [keras.ops.convert_to_numpy(v).astype(np.float64) for v in variables]
    return np.concatenate(values)


def _sum(vector: np.ndarray, process_set: ProcessSet | None) -> np.ndarray:
    summed = collectives.allreduce(
        tf.constant(vector),
        op=ReduceOp.SUM,
        name="combine_moving_statistics, sums",
        process_set=process_set,
    )
    return np.array(summed)


def _share(
    own: dict[str, Any], shared: list[dict[str, Any]], ranks: list[int]
) -> float:
    """Returns this rank's share of the weights; all ranks raise on any mismatch."""
    first = shared[0]
    for rank, other in zip(ranks, shared, strict=True):
        if other["where"] != first["where"]:
            raise errors.MismatchError(
                "The ranks combine moving statistics at different places: rank "
                f"{ranks[0]} {first['where']}, rank {rank} {other['where']}. Use the "
                "same callbacks on all ranks, and validate on all ranks or on none."
            )
        if other["layers"] != first["layers"]:
            raise errors.MismatchError(
                "The batch normalization layers differ between ranks: "
                f"{_difference(ranks[0], first['layers'], rank, other['layers'])}. "
                "Build the same model on all ranks. (Keras appends numbers to layer "
                "names. If only these numbers differ, call "
                "keras.utils.clear_session() on all ranks before building the model.)"
            )
        if not (math.isfinite(other["weight"]) and other["weight"] >= 0):
            raise ValueError(
                "Expected weight to be a finite number of at least 0, got "
                f"{other['weight']!r} on rank {rank}."
            )
    total = math.fsum(other["weight"] for other in shared)
    if total == 0:
        raise ValueError("Expected a weight above 0 on at least one rank, got only 0.")
    return float(own["weight"] / total)


def _difference(rank: int, own: list[str], other_rank: int, others: list[str]) -> str:
    for number, (a, b) in enumerate(zip(own, others, strict=False)):
        if a != b:
            return f"layer {number} is {a!r} on rank {rank}, {b!r} on rank {other_rank}"
    return (
        f"rank {rank} has {len(own)} built layers, rank {other_rank} has {len(others)}"
    )
