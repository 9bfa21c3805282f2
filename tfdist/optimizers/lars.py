"""LARS: layer-wise adaptive learning rates, for very large batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options
from tfdist.optimizers.momentum_sgd import MomentumSGD


@keras.saving.register_keras_serializable(package="tfdist")
class LARS(MomentumSGD):
    """Layer-wise adaptive rate scaling.

    A step changes every layer by about the same fraction of its norm. Let `|.|` be the
    Euclidean norm of one variable, and rate the global learning rate of the step::

        local = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)
        v <- momentum * v + rate * local * (g + weight_decay * w)
        w <- w - v

    Both rates are part of the velocity, as in algorithm 1 of the paper, so a later
    change of the rates does not affect earlier steps. With `momentum_correction=True`
    only the local rate is part of the velocity, and the global rate is applied
    afterwards, as in `MomentumSGD`.

    If `|w|` or `|g|` is zero, local is 1. Excluded variables use local = 1 and no
    decay. Their steps use the global rate, which is much larger than rates of other
    optimizers and therefore needs a warm-up.

    `|g|` is computed from the gradient that the optimizer gets. In
    `tfdist.DistributedOptimizer` this is the average over all ranks, after
    accumulation, unscaling and clipping. Norms are computed in float32 (float64 for
    float64 variables), even if variables are float16 or bfloat16. Each norm is a sum
    over a complete variable. Ranks get bitwise equal norms if they have the same number
    of TensorFlow threads.

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a function without
            arguments. With the default trust coefficient, typical values are 1 to 40.
        momentum: factor of the velocity, in [0, 1]; default 0.9.
        nesterov: whether to use Nesterov momentum; default False, as in the paper.
        trust_coefficient: eta in the paper, above 0; default 0.001.
        epsilon: added to the denominator, at least 0; default 0, as in the paper. Zero
            norms are handled without it.
        weight_decay: beta in the paper, at least 0; default None: 0.
        exclude: variables without adaptation or weight decay, see `MomentumSGD`.
            Default None: variables of at most one dimension.
        momentum_correction: whether the global rate is applied after the velocity;
            default False, as in the paper.
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
        >>> rate = tfdist.optimizers.Warmup(
        ...     keras.optimizers.schedules.PolynomialDecay(29.0, 900, 0.0, power=2.0),
        ...     warmup_steps=100, delay=True)
        >>> optimizer = tfdist.optimizers.LARS(rate, weight_decay=1e-4)
        >>> model.compile(tfdist.DistributedOptimizer(optimizer), loss="mse")

    References:
        You, Gitman & Ginsburg, Large Batch Training of Convolutional Networks, 2017:
        section 4, algorithm 1 (arXiv:1708.03888).
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        weight_decay: float | None = None,
        exclude: _exclusions.Exclude = None,
        momentum_correction: bool = False,
        **keras_options: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            exclude=exclude,
            momentum_correction=momentum_correction,
            **keras_options,
        )
        self.trust_coefficient = _options.number(
            "trust_coefficient", trust_coefficient, above=0
        )
        self.epsilon = _options.number("epsilon", epsilon, at_least=0)

    def _direction(
        self, gradient: Any, weights: Any, variable: Any, rate: tf.Tensor
    ) -> Any:
        direction = super()._direction(gradient, weights, variable, rate)
        if self._is_excluded(variable):
            return direction
        size = tf.norm(weights)
        slope = tf.norm(gradient)
        below = slope + self._decay_of(variable) * size + self.epsilon
        local = self.trust_coefficient * size / below
        both = tf.logical_and(size > 0, slope > 0)  # else 0 / 0 may be in `local`
        return tf.where(both, local, tf.ones_like(local)) * direction

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        return {
            **super().get_config(),
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
        }
