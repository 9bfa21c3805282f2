"""Horovod's elastic states of TensorFlow variables; see `common.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.signature import describe_variable
from tfdist.horovod.common.elastic import ObjectState, run
from tfdist.horovod.tensorflow.functions import broadcast_object, broadcast_variables
from tfdist.horovod.tensorflow.mpi_ops import rank

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class _VariablesState(ObjectState):
    """Elastic state of variables, and of plain values as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self._values: list[tuple[Any, tf.Tensor]] = []  # variable, saved value
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def _tracked(self) -> list[Any]:
        raise NotImplementedError

    def save(self) -> None:
        """Copies the variables and saves the attributes."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """Restores the last saved state."""
        for variable, value in self._values:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcasts the newest variables and attributes to all ranks; saves them."""
        # The saved state is replaced last, so it stays complete if a rank is lost here.
        values = self._newest_values()
        broadcast_variables(self._tracked(), root_rank=self._newest_rank)
        self._copy()
        self._take(values)

    def _copy(self) -> None:
        self._values = [(v, tf.identity(v)) for v in self._tracked()]

    def _describe(self) -> list[str]:
        return [*super()._describe(), *map(describe_variable, self._tracked())]


class TensorFlowState(_VariablesState):
    """State of a list of variables, and plain values as attributes; for eager mode.

    Args:
        variables: Keras or TensorFlow variables.
        session: must be None: sessions of TensorFlow 1 are not supported.
        **kwargs: name and initial value of each attribute.

    Raises:
        ValueError: no variables are given, a session is given, or the call is in a
            graph.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> @hvd.elastic.run
        ... def train(state):
        ...     return state.epoch
        >>> train(hvd.elastic.TensorFlowState([tf.Variable(1.0)], epoch=3))
        3
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None or not tf.executing_eagerly():
            raise ValueError(
                "TensorFlowState supports only eager mode in this release: expected "
                "session=None outside a tf.Graph. In a graph, run "
                "hvd.broadcast_global_variables(0)."
            )
        if not variables:
            raise ValueError(
                "Expected a list of variables to track: in eager mode there are no "
                "global variables."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)

    def _tracked(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_VariablesState):
    """State of a Keras model, its optimizer, and plain values as attributes.

    Args:
        model: a built model.
        optimizer: the optimizer, which is built if necessary; default: the model's.
        backend: must be None: it was used for sessions of TensorFlow 1.
        **kwargs: name and initial value of each attribute.

    Raises:
        ValueError: the model is not built, or `backend` is given.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "The model must be built first. Call model.build(input_shape)."
            )
        if backend is not None:
            raise ValueError(
                "Expected backend=None: it was for sessions of TensorFlow 1, got "
                f"{backend!r}."
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            # Slots that are created later could not be restored to their initial state.
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def _tracked(self) -> list[Any]:
        of_optimizer = self.optimizer.variables if self.optimizer is not None else []
        return [*self.model.weights, *of_optimizer]
