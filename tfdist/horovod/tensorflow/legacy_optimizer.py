"""Wrapper that makes TensorFlow 1 optimizers reduce gradients over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.local_variables import LocalVariables
from tfdist.horovod.tensorflow.gradients import GradientOptions

_Optimizer: Any = tf.compat.v1.train.Optimizer
# Of the sums of gradients: as in Horovod, they are not saved, and are initialized by
# `local_variables_initializer`.
_COLLECTIONS = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]


class LegacyDistributedOptimizer(_Optimizer):
    """Wraps a `tf.compat.v1.train.Optimizer`; created by `DistributedOptimizer`.

    Args:
        optimizer: optimizer that applies the reduced gradients.
        options: options of the reduction.
        name: default: "Distributed" followed by the class name of `optimizer`.
        use_locking: as in other TensorFlow 1 optimizers.
        passes: number of backward passes whose gradients are added up before they are
            reduced and applied. Values above 1 work only in graphs, and the sums are
            local variables, which `tf.compat.v1.local_variables_initializer` has to
            initialize.
        average_passes: whether the sum of the gradients is divided by `passes`.

    Raises:
        ValueError: `passes` is not an integer or is below 1, or above 1 in eager mode.
    """

    def __init__(
        self,
        optimizer: Any,
        options: GradientOptions,
        *,
        name: str | None = None,
        use_locking: bool = False,
        passes: int = 1,
        average_passes: bool = False,
    ) -> None:
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(
                f"Expected backward_passes_per_step to be an integer >= 1, got "
                f"{passes!r}."
            )
        if passes > 1 and tf.executing_eagerly():
            raise ValueError(
                "backward_passes_per_step > 1 with a TensorFlow 1 optimizer works only "
                "in graphs. In eager mode, use a Keras optimizer."
            )
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._options = options
        self._local: list[Any] = []
        self._passes, self._average_passes = passes, average_passes
        self._ends_step: Any = None  # whether this pass is the last of a step

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from the reduction.

        All ranks must call this method with the same variables.
        """
        LocalVariables([var])  # raises TypeError if `var` is not a variable
        self._local.append(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes gradients with the wrapped optimizer and reduces them.

        With `passes` above 1, the returned gradients are 0 in all passes but the last
        pass of each step.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._reduce if self._passes == 1 else self._reduce_the_last
        return list(zip(reduce(grads, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Applies gradients; with `passes` above 1, only in a step's last pass.

        `global_step` is incremented in every pass, as in Horovod.
        """
        pairs = list(grads_and_vars)
        if self._ends_step is None:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        def apply() -> Any:
            with tf.control_dependencies(
                [self._optimizer.apply_gradients(pairs, global_step, name)]
            ):
                return tf.constant(True)

        def skip() -> Any:
            counted = []
            if global_step is not None:
                counted.append(global_step.assign_add(1, read_value=False))
            with tf.control_dependencies(counted):
                return tf.constant(False)

        return tf.group(tf.cond(self._ends_step, apply, skip))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the same method of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)

    def _reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._options.reduce(grads, variables, self._local)

    def _reduce_the_last(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Adds gradients to sums; a step's last pass reduces and clears the sums."""
        grads = self._options.fill_missing(grads, variables, self._local)
        places = [i for i, g in enumerate(grads) if g is not None]
        with tf.compat.v1.variable_scope(None, default_name=f"{self.get_name()}_sums"):
            sums = [_zeros_like(variables[i], f"sum{i}") for i in places]
            count = tf.compat.v1.get_variable(
                "passes",
                initializer=tf.constant(0, tf.int64),
                trainable=False,
                collections=_COLLECTIONS,
                use_resource=True,
            )
        added = [
            total.assign_add(tf.convert_to_tensor(grads[i]))
            for total, i in zip(sums, places, strict=True)
        ]
        with tf.control_dependencies(added):
            counted = count.assign_add(1, read_value=True)
        self._ends_step = tf.equal(counted % self._passes, 0)

        def reduce() -> list[tf.Tensor]:
            found: list[Any] = [None] * len(grads)
            for total, i in zip(sums, places, strict=True):
                value = total.read_value()
                found[i] = value / self._passes if self._average_passes else value
            ends = self._reduce(found, variables)
            chosen = [tf.identity(ends[i]) for i in places]
            with tf.control_dependencies(chosen):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(end) for end in chosen]

        def nothing() -> list[tf.Tensor]:
            return [tf.zeros_like(total) for total in sums]

        with tf.control_dependencies([counted]):
            reduced = tf.cond(self._ends_step, reduce, nothing)
        found: list[Any] = list(grads)
        for i, end in zip(places, reduced, strict=True):
            found[i] = end
        return found


def _zeros_like(variable: Any, name: str) -> Any:
    return tf.compat.v1.get_variable(
        name,
        shape=variable.shape,
        dtype=tf.as_dtype(variable.dtype).base_dtype,
        initializer=tf.compat.v1.zeros_initializer(),
        trainable=False,
        collections=_COLLECTIONS,
        use_resource=True,
    )
