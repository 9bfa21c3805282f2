"""Horovod's elastic states of TensorFlow variables; see `common.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.local_variables import identity
from tfdist.collectives.signature import describe_variable
from tfdist.collectives.variables import broadcast_variables
from tfdist.gradients import accumulation
from tfdist.horovod.common.elastic import ObjectState, run
from tfdist.horovod.tensorflow.functions import broadcast_object
from tfdist.horovod.tensorflow.mpi_ops import rank
from tfdist.training.optimizer_mixins import ReducesUpdates

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class _VariablesState(ObjectState):
    """Elastic state of variables, and of plain values as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self._values: list[tuple[Any, tf.Tensor]] = []  # variable, saved value
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def _tracked(self) -> list[Any]:
        raise NotImplementedError

    def _accumulators(self) -> list[Any]:
        """Returns the variables with gradients that this rank has accumulated."""
        return []

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
        accumulators = self._accumulators()
        sent = list(self._tracked())
        if self._is_newest is None:  # before the first step: those of a checkpoint
            sent += accumulators
        broadcast_variables(sent, self._newest_rank)
        if self._is_newest is False:  # they do not belong to the newest commit
            for variable in accumulators:
                variable.assign(tf.zeros(variable.shape, variable.dtype))
        self._copy()
        self._take(values)

    def _copy(self) -> None:
        tracked = [*self._tracked(), *self._accumulators()]
        self._values = [(v, tf.identity(v)) for v in tracked]

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

    With `backward_passes_per_step`, each rank saves and restores the gradients that it
    has accumulated. After the ranks have changed, `sync` does not send them: ranks that
    receive a newer state start with zeros.

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
        own = set(map(identity, self._accumulators()))
        shared = [v for v in of_optimizer if identity(v) not in own]
        return [*self.model.weights, *shared]

    def _accumulators(self) -> list[Any]:
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        # Gradients that a tape reduces before they are accumulated are equal on all
        # ranks.
        if not (
            isinstance(inner, ReducesUpdates) and inner.gradient_accumulation_steps
        ):
            return []
        accumulators = inner._accumulated_gradients  # type: ignore[attr-defined]
        sums = [v for v in accumulators if v is not None]
        return sums + accumulation.totals(inner)
