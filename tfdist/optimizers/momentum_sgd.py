"""MomentumSGD: SGD with momentum and weight decay as in large-batch papers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options
from tfdist.optimizers._base import OptimizerWithExclusions, wide_dtype


@keras.saving.register_keras_serializable(package="tfdist")
class MomentumSGD(OptimizerWithExclusions):
    """Stochastic gradient descent as defined in large-batch papers.

    Let g be the gradient, rate the learning rate of the step, and v the velocity:

        d = g + weight_decay * w            (d = g if w is excluded)
        v <- momentum * v + rate * d
        w <- w - v                          (nesterov: w - momentum * v - rate * d)

    There are two differences from `keras.optimizers.SGD`. First, weight decay is added
    to the gradient and so becomes part of the velocity, whereas Keras decays the
    weights separately. Second, biases and the scale and shift of normalization layers
    are not decayed.

    With `momentum_correction=True` the rate is not part of the velocity:

        v <- momentum * v + d
        w <- w - rate * v                   (nesterov: w - rate * (momentum * v + d))

    For a constant rate both forms are equivalent. When the rate changes from one step
    to the next, by a schedule or by assignment, the second form is equivalent to the
    first with the velocity multiplied by rate / previous rate. This is the momentum
    correction of Goyal et al. Without it, the old rate remains in the velocity for
    about 1 / (1 - momentum) steps.

    Updates are computed in float32, or in float64 for float64 variables. Sparse
    gradients are converted to dense ones, because the velocity changes every row.

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a function without
            arguments.
        momentum: factor of the velocity, in [0, 1]; 0 means no velocity; default 0.9.
        nesterov: whether to use Nesterov momentum; default False.
        weight_decay: factor of w in the gradient, at least 0; default None: 0.
        exclude: variables without weight decay. Default None: variables of at most one
            dimension (biases, gamma and beta). Otherwise, a regular expression or a
            list of them, which are searched for in `variable.path`; a pattern without a
            match logs a warning. Or a function that accepts a variable and returns
            whether it is excluded. To save the model, register this function with
            `keras.saving.register_keras_serializable`. `[]` excludes no variables.
        momentum_correction: whether the rate is kept out of the velocity; default
            False.
        clipnorm: maximum norm of each gradient, above 0; applied before weight decay.
            Default None: no limit.
        clipvalue: maximum absolute value of each gradient element, above 0; default
            None.
        global_clipnorm: maximum norm of all gradients together, above 0; default None.
        use_ema: whether to keep moving averages of the weights; default False.
        ema_momentum: momentum of the moving averages, in [0, 1]; default 0.99.
        ema_overwrite_frequency: number of steps after which the weights are replaced
            with their averages; default None: at the end of `fit`.
        loss_scale_factor: fixed loss scale, above 0; default None.
        gradient_accumulation_steps: number of batches per update, at least 2; default
            None.
        name: name of the optimizer; default: derived from the class name.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: a number is out of range.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(
        ...     tfdist.DistributedOptimizer(tfdist.optimizers.MomentumSGD(
        ...         0.1, nesterov=True, weight_decay=1e-4, momentum_correction=True)),
        ...     loss="mse")

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017:
        equations 9 and 10, remark 2 of section 3, section 5.1 (arXiv:1706.02677).
        Sutskever, Martens, Dahl & Hinton, On the Importance of Initialization and
        Momentum in Deep Learning, ICML 2013, section 2 (Nesterov's momentum).
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        exclude: _exclusions.Exclude = None,
        momentum_correction: bool = False,
        **keras_options: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            exclude=exclude,
            **keras_options,
        )
        self.momentum = _options.fraction("momentum", momentum)
        self.nesterov = _options.flag("nesterov", nesterov)
        self.momentum_correction = _options.flag(
            "momentum_correction", momentum_correction
        )
        self.momentums: list[Any] = []
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.")

    def build(self, variables: list[Any]) -> None:
        """Creates the velocities as zeros with the variables' shapes and dtypes."""
        if self.built:
            return
        super().build(variables)
        if self.momentum:
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable with its clipped gradient."""
        wide = wide_dtype(variable)
        weights = tf.cast(tf.convert_to_tensor(variable), wide)
        gradient = tf.cast(gradient, wide)
        rate = tf.cast(learning_rate, wide)
        inner = self._direction(gradient, weights, variable, rate)
        if not self.momentum:
            self.assign_sub(variable, rate * inner)
            return
        velocity = self.momentums[self._get_variable_index(variable)]
        before = tf.cast(tf.convert_to_tensor(velocity), wide)
        if not self.momentum_correction:
            inner, rate = rate * inner, tf.ones([], wide)
        after = self.momentum * before + inner
        self.assign(velocity, after)
        if self.nesterov:
            after = self.momentum * after + inner
        self.assign_sub(variable, rate * after)

    def _direction(
        self, gradient: Any, weights: Any, variable: Any, rate: tf.Tensor
    ) -> Any:
        """Returns the gradient plus weight decay, not multiplied by the rate."""
        del rate  # for subclasses
        return gradient + self._decay_of(variable) * weights

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "momentum_correction": self.momentum_correction,
        }
