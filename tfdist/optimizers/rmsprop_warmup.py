"""RMSpropWarmup: begins as RMSprop and becomes SGD, for very large batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options
from tfdist.optimizers.momentum_sgd import MomentumSGD


@keras.saving.register_keras_serializable(package="tfdist")
class RMSpropWarmup(MomentumSGD):
    """SGD with momentum that begins as RMSprop, instead of a learning-rate warm-up.

    Let g be the gradient, rate the learning rate of the step, s the index of the step,
    from 0, and a = `sgd_share(s, center_steps, period_steps)`, which rises from about 0
    to 1::

        d = g + weight_decay * w            (d = g if w is excluded)
        m <- rho * m + (1 - rho) * d^2
        b = (1 - a) * rmsprop_rate / rate   (b = 0 if the rate is 0)
        v <- momentum * v + (a + b / (sqrt(m) + epsilon)) * d
        w <- w - rate * v

    With `nesterov` and with `momentum_correction=False`, v and w change as in
    `MomentumSGD`. From step `center_steps + period_steps / 2` on, a is 1, and this is
    `MomentumSGD`. While a is small, a step depends little on the rate and the size of
    the gradients. The mean of the squares starts at 0 and has no bias correction, so
    each element of the first step has about the size `rmsprop_rate / sqrt(1 - rho)`:
    10 times `rmsprop_rate` by default.

    As in a learning-rate schedule, steps are batches of a rank, not updates, if
    `gradient_accumulation_steps` is set. No warm-up of the rate is needed. The paper
    uses a center of 10 epochs and a period of 5, and a rate that is smaller than that
    of linear scaling (slow start; docs/large-batches.md).

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a function without
            arguments: the rate of SGD.
        center_steps: step at which SGD and RMSprop have equal shares, above 0.
        period_steps: length of the transition, above 0; the transition is over at step
            `center_steps + period_steps / 2`.
        rmsprop_rate: rate of RMSprop, above 0; default 3e-4, as in the paper.
        rho: factor of the mean of the squares, in [0, 1); default 0.99.
        epsilon: added to the root of this mean, above 0; default 1e-8.
        momentum: factor of the velocity, in [0, 1]; default 0.9.
        nesterov: whether to use Nesterov momentum; default False.
        weight_decay: factor of w in the gradient, at least 0; default None: 0. The
            paper uses 1e-4.
        exclude: variables without weight decay, see `MomentumSGD`. Default None:
            variables of at most one dimension.
        momentum_correction: whether the rate is kept out of the velocity; default True,
            as in the paper.
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
        >>> optimizer = tfdist.optimizers.RMSpropWarmup(
        ...     3.2, center_steps=10 * 40, period_steps=5 * 40, weight_decay=1e-4)
        >>> model.compile(tfdist.DistributedOptimizer(optimizer), loss="mse")

    References:
        Akiba, Suzuki & Fukuda, Extremely Large Minibatch SGD: Training ResNet-50 on
        ImageNet in 15 Minutes, 2017, section 3 (arXiv:1711.04325); for the transition,
        see `sgd_share`.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        center_steps: float,
        period_steps: float,
        rmsprop_rate: float = 3e-4,
        rho: float = 0.99,
        epsilon: float = 1e-8,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        exclude: _exclusions.Exclude = None,
        momentum_correction: bool = True,
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
        self.center_steps = _options.number("center_steps", center_steps, above=0)
        self.period_steps = _options.number("period_steps", period_steps, above=0)
        self.rmsprop_rate = _options.number("rmsprop_rate", rmsprop_rate, above=0)
        self.rho = _options.fraction("rho", rho, below_one=True)
        self.epsilon = _options.number("epsilon", epsilon, above=0)

    def build(self, variables: list[Any]) -> None:
        """Creates velocities and mean squares as zeros with the variables' shapes."""
        if self.built:
            return
        super().build(variables)
        self._squares = self.add_optimizer_variables(variables, "mean_square")

    def _direction(
        self, gradient: Any, weights: Any, variable: Any, rate: tf.Tensor
    ) -> Any:
        direction = super()._direction(gradient, weights, variable, rate)
        squares = self._squares[self._get_variable_index(variable)]
        before = tf.cast(tf.convert_to_tensor(squares), direction.dtype)
        after = self.rho * before + (1 - self.rho) * tf.square(direction)
        self.assign(squares, after)
        share = self._sgd_share(direction.dtype)
        relative = tf.math.divide_no_nan((1 - share) * self.rmsprop_rate, rate)
        return (share + relative / (tf.sqrt(after) + self.epsilon)) * direction

    def _sgd_share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns `sgd_share` of the current step."""
        step = tf.cast(tf.convert_to_tensor(self._iterations), tf.float64)
        periods = (step - self.center_steps) / self.period_steps
        rising = tf.exp(2 * tf.minimum(periods, 0)) / 2
        return tf.cast(tf.minimum(rising + tf.maximum(periods, 0), 1), dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        return {
            **super().get_config(),
            "center_steps": self.center_steps,
            "period_steps": self.period_steps,
            "rmsprop_rate": self.rmsprop_rate,
            "rho": self.rho,
            "epsilon": self.epsilon,
        }
