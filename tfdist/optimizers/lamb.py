"""LAMB: layer-wise adaptive moments, for very large batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options
from tfdist.optimizers._base import OptimizerWithExclusions, wide_dtype


@keras.saving.register_keras_serializable(package="tfdist")
class LAMB(OptimizerWithExclusions):
    """Adam with layer-wise steps, each proportional to the norm of the layer's weights.

    Let g be the gradient, t the number of the update, from 1, `|.|` the Euclidean norm
    of one variable, and rate the global learning rate of the update::

        m <- beta_1 * m + (1 - beta_1) * g
        v <- beta_2 * v + (1 - beta_2) * g^2
        r = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)
        d = r + weight_decay * w
        w <- w - rate * |w| / |d| * d

    If `|w|` or `|d|` is zero, the ratio of the norms is 1. Excluded variables use a
    ratio of 1 and no decay; for them, this is Adam.

    `keras.optimizers.Lamb` differs from the paper: the weight decay is applied
    separately, so that it is neither part of `|d|` nor multiplied by the ratio; no
    variables are excluded; and epsilon is 1e-7.

    In `tfdist.DistributedOptimizer`, g is the average over all ranks, after
    accumulation, unscaling and clipping. Updates and norms are computed in float32
    (float64 for float64 variables), even if variables are float16 or bfloat16. Ranks
    get bitwise equal norms if they have the same number of TensorFlow threads. Sparse
    gradients are converted to dense ones, because the moments change every row.

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a function without
            arguments. An update changes a layer by this fraction of its norm.
        beta_1: factor of the first moment, in [0, 1); default 0.9.
        beta_2: factor of the second moment, in [0, 1); default 0.999.
        epsilon: added to the root of the second moment, above 0; default 1e-6.
        weight_decay: lambda in the paper, at least 0; default None: 0. The paper uses
            0.01.
        exclude: variables without adaptation or weight decay, see `MomentumSGD`.
            Default None: variables of at most one dimension.
        **keras_options: `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`,
            `ema_momentum`, `ema_overwrite_frequency`, `loss_scale_factor`,
            `gradient_accumulation_steps`, `name`: see `MomentumSGD`.

    Raises:
        TypeError: an option has the wrong type or is unknown.
        ValueError: a number is out of range.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> rate = tfdist.optimizers.Warmup(0.01, warmup_steps=100)
        >>> optimizer = tfdist.optimizers.LAMB(rate, weight_decay=0.01)
        >>> model.compile(tfdist.DistributedOptimizer(optimizer), loss="mse")

    References:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76
        Minutes, ICLR 2020: algorithm 2, with the identity for phi (arXiv:1904.00962).
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        exclude: _exclusions.Exclude = None,
        **keras_options: Any,
    ) -> None:
        super().__init__(
            learning_rate, weight_decay=weight_decay, exclude=exclude, **keras_options
        )
        self.beta_1 = _options.fraction("beta_1", beta_1, below_one=True)
        self.beta_2 = _options.fraction("beta_2", beta_2, below_one=True)
        self.epsilon = _options.number("epsilon", epsilon, above=0)

    def build(self, variables: list[Any]) -> None:
        """Creates the moments as zeros with the variables' shapes and dtypes."""
        if self.built:
            return
        super().build(variables)
        self._moments = self.add_optimizer_variables(variables, "first_moment")
        self._squares = self.add_optimizer_variables(variables, "second_moment")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable with its clipped gradient."""
        wide = wide_dtype(variable)
        weights = tf.cast(tf.convert_to_tensor(variable), wide)
        gradient = tf.cast(gradient, wide)
        index = self._get_variable_index(variable)
        first = self._moved(self._moments[index], gradient, self.beta_1)
        second = self._moved(self._squares[index], tf.square(gradient), self.beta_2)
        direction = first / (tf.sqrt(second) + self.epsilon)
        direction += self._decay_of(variable) * weights
        step = tf.cast(learning_rate, wide) * direction
        if not self._is_excluded(variable):
            size, length = tf.norm(weights), tf.norm(direction)
            both = tf.logical_and(size > 0, length > 0)  # else the ratio may be 0 / 0
            step *= tf.where(both, size / length, tf.ones_like(size))
        self.assign_sub(variable, step)

    def _moved(self, moment: Any, value: tf.Tensor, beta: float) -> tf.Tensor:
        """Moves a moment towards a value; returns it without its bias towards zero."""
        before = tf.cast(tf.convert_to_tensor(moment), value.dtype)
        after = beta * before + (1 - beta) * value
        self.assign(moment, after)
        # In float32, 1 - 0.999 has an error of 1e-5.
        updates = tf.cast(self.iterations + 1, tf.float64)
        bias = 1 - tf.pow(tf.constant(beta, tf.float64), updates)
        return after / tf.cast(bias, value.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }
