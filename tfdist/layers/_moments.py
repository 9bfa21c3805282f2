"""Differentiable mean and variance over the batches of all ranks.

Each rank sends one row: the number of its values, their mean and their variance. The
law of total variance combines the rows. With `n[r]` values of mean `m[r]` and variance
`v[r]` on rank `r`,

    n = sum n[r],  m = sum n[r] m[r] / n,  v = sum n[r] (v[r] + (m[r] - m)^2) / n

Unlike `E[x^2] - m^2`, this formula does not subtract large numbers from each other, so
the result is as accurate as in one process. `n[r]` may differ between ranks and may be
0.

In the backward pass, let `dm[r]` and `dv[r]` be the gradients of rank `r` for `m` and
`v`. The gradient of the sum of all ranks' losses for a value `x` of this rank is

    dx = (sum dm[r] + 2 (x - m) sum dv[r]) / n

which needs one allreduce of both gradients. For `C` channels, a layer therefore costs
one operation with `2 C + 1` numbers from each rank in the forward pass, and one with
`2 C` numbers in the backward pass.

References:
    Chan, Golub & LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances, COMPSTAT 1982, section 2.
    Ioffe & Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift, ICML 2015, section 3 (the backward pass).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_names import operation_name


@tf.autograph.experimental.do_not_convert
def synchronized_moments(
    inputs: tf.Tensor,
    axis: int,
    *,
    mask: tf.Tensor | None = None,
    slack: float = 0.0,
    process_set: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over the values of all ranks, for each channel.

    Args:
        inputs: floating-point tensor with a channel dimension of static size `C`. The
            sizes of other dimensions, and so the number of values, may differ between
            ranks.
        axis: index of the channel dimension, at least 0.
        mask: bool tensor of the shape of `inputs`, True for values to include; default:
            all values.
        slack: number added to the count of values before dividing by it, as Keras does
            with a mask; default 0.
        process_set: id of the process set that takes part; default: all ranks.

    Returns:
        Mean and variance, of shape `[C]` and equal on all ranks. Both can be
        differentiated twice.
    """
    channels = inputs.shape[axis]
    name = operation_name("batch_norm", None, process_set=process_set)

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> Any:
        rows = emit.allgather(
            tf.concat(_local_moments(x, axis, mask), axis=0)[tf.newaxis],
            name,
            None,
            process_set=process_set,
        ).rows
        count, true_mean, true_variance = combine_rows(rows, channels)
        # Keras divides by count + slack, and uses the deviations from that mean.
        share = tf.math.divide_no_nan(count, count + slack)
        mean = true_mean * share
        offset = true_mean - mean
        variance = (true_variance + offset * offset) * share

        def gradient(d_mean: tf.Tensor, d_variance: tf.Tensor) -> tf.Tensor:
            [summed] = emit.allreduce(
                [tf.concat([d_mean, d_variance], axis=0)],
                operation_name(
                    "batch_norm", f"{name}.gradient", process_set=process_set
                ),
                ReduceOp.SUM,
                "1.0",
                "1.0",
                None,
                process_set=process_set,
            )
            d_mean, d_variance = summed[:channels], summed[channels:]
            # Without slack, `centre` is the mean. With slack, the variance is not
            # minimal at the mean, so the variance also depends on the mean.
            centre = mean + offset * share
            slope = tf.math.divide_no_nan(2.0 * d_variance, count + slack)
            level = tf.math.divide_no_nan(d_mean, count + slack)
            deviation = x - _along(centre, x, axis)
            dx = deviation * _along(slope, x, axis) + _along(level, x, axis)
            return dx if mask is None else tf.where(mask, dx, tf.zeros_like(dx))

        return (mean, variance), gradient

    mean, variance = moments(inputs)
    return mean, variance


def combine_rows(
    rows: tf.Tensor, channels: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance of the union of several sets of values.

    Args:
        rows: tensor of shape `[sets, c + 2 C]`, with counts, means and variances of
            each set. `c` is 1 for one common count, or `C` for one per channel.
        channels: the number of channels, `C`.

    Returns:
        Counts, means and variances, of shapes `[c]`, `[C]` and `[C]`. Means and
        variances are zero for a count of 0.
    """
    counts = rows[:, : -2 * channels]
    means = rows[:, -2 * channels : -channels]
    variances = rows[:, -channels:]
    count = tf.reduce_sum(counts, axis=0)
    share = tf.math.divide_no_nan(counts, count)
    mean = tf.reduce_sum(share * means, axis=0)
    spread = variances + tf.math.squared_difference(means, mean)
    return count, mean, tf.reduce_sum(share * spread, axis=0)


def _local_moments(
    x: tf.Tensor, axis: int, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance of this rank's values; zeros if it has none."""
    others = [d for d in range(len(x.shape)) if d != axis]
    channels = x.shape[axis]
    if mask is None:
        shape = tf.shape(x)
        count = tf.reduce_prod(tf.gather(shape, others))[tf.newaxis]
        count = tf.cast(count, x.dtype)
        mean, variance = tf.nn.moments(x, others)
        return count, _if_any(count, mean), _if_any(count, variance)
    zero = tf.zeros([], x.dtype)
    count = tf.reduce_sum(tf.cast(mask, x.dtype), others)
    mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(mask, x, zero), others), count)
    deviation = tf.where(mask, x - _along(mean, x, axis), zero)
    squares = tf.reduce_sum(deviation * deviation, others)
    variance = tf.math.divide_no_nan(squares, count)
    return tuple(tf.ensure_shape(t, [channels]) for t in (count, mean, variance))


def _if_any(count: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return tf.where(count > 0, value, tf.zeros_like(value))


def _along(vector: tf.Tensor, x: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the vector, reshaped to lie along dimension `axis` of `x`."""
    shape = [1] * len(x.shape)
    shape[axis] = -1
    return tf.reshape(vector, shape)
