"""MomentumSGD: SGD with momentum and weight decay as in large-batch papers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers import _exclusions, _options


@keras.saving.register_keras_serializable(package="tfdist")
class MomentumSGD(keras.optimizers.Optimizer):
    """Stochastic gradient descent as defined in large-batch papers.

    Let g be the gradient, rate the learning rate of the step, and v the velocity:

        d = g + weight_decay * w            (d = g if w is excluded)
        v <- momentum * v + rate * d
        w <- w - v                          (nesterov: w - momentum * v - rate * d)

    There are two differences from `keras.optimizers.SGD`. First, weight decay is added
    to the gradient and so becomes part of the velocity, whereas Keras decays the
    weights separately. Second, biases and the scale and shift of normalisation layers
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
            dimension (biases, gamma and beta). Alternatively, a regular expression or a
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
        ema_overwrite_frequency: number of steps after which the weights are replaced by
            their averages; default None: at the end of `fit`.
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
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(learning_rate):
            learning_rate = _options.number("learning_rate", learning_rate, at_least=0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name: expected a string or None, got {name!r}.")
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue}
        clips |= {"global_clipnorm": global_clipnorm}
        clips |= {"loss_scale_factor": loss_scale_factor}
        counts = {"ema_overwrite_frequency": (ema_overwrite_frequency, 1)}
        counts |= {"gradient_accumulation_steps": (gradient_accumulation_steps, 2)}
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=None
            if weight_decay is None
            else _options.number("weight_decay", weight_decay, at_least=0),
            use_ema=_options.flag("use_ema", use_ema),
            ema_momentum=_options.fraction("ema_momentum", ema_momentum),
            name=name,
            **{
                key: None if value is None else _options.number(key, value, above=0)
                for key, value in clips.items()
            },
            **{
                key: None
                if value is None
                else _options.integer(key, value, at_least=low)
                for key, (value, low) in counts.items()
            },
        )
        self.momentum = _options.fraction("momentum", momentum)
        self.nesterov = _options.flag("nesterov", nesterov)
        self.momentum_correction = _options.flag(
            "momentum_correction", momentum_correction
        )
        self.exclude = _exclusions.check_exclude(exclude)
        self.momentums: list[Any] = []
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.")

    def build(self, variables: list[Any]) -> None:
        """Creates the velocities as zeros with the variables' shapes and dtypes."""
        if self.built:
            return
        super().build(variables)
        found = _exclusions.are_excluded(variables, self.exclude)
        self._excluded = frozenset(
            self._var_key(v) for v, out in zip(variables, found, strict=True) if out
        )
        if self.momentum:
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables with one gradient for each variable."""
        # Convert before clipping, because sparse gradients may have duplicate rows.
        dense = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in grads
        ]
        super().apply(dense, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable with its clipped gradient."""
        wide = tf.float64 if variable.dtype in ("float64", tf.float64) else tf.float32
        weights = tf.cast(tf.convert_to_tensor(variable), wide)
        gradient = tf.cast(gradient, wide)
        rate = tf.cast(learning_rate, wide)
        inner = self._direction(gradient, weights, variable)
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

    def _direction(self, gradient: Any, weights: Any, variable: Any) -> Any:
        """Returns the gradient plus weight decay, without the learning rate."""
        return gradient + self._decay_of(variable) * weights

    def _decay_of(self, variable: Any) -> float:
        # The second condition implements Keras's exclude_from_weight_decay().
        if self._is_excluded(variable) or not self._use_weight_decay(variable):
            return 0.0
        return self.weight_decay or 0.0

    def _is_excluded(self, variable: Any) -> bool:
        return self._var_key(variable) in self._excluded

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing, because this class adds weight decay to the gradient."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config` and saved models."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "momentum_correction": self.momentum_correction,
            "exclude": _exclusions.serialize(self.exclude),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> MomentumSGD:
        """Creates an optimizer, without state, from the result of `get_config`."""
        exclude = _exclusions.deserialize(config.get("exclude"), custom_objects)
        return super().from_config({**config, "exclude": exclude}, custom_objects)
