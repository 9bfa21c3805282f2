"""Horovod for the workers that reduce or train in TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
VERSIONS = {
    "horovod": horovod.__version__,
    "tensorflow": tf.__version__,
    "by": "MPI" if hvd.mpi_enabled() else "gloo",
}
function: Callable[..., Any] = tf.function
scope = contextlib.nullcontext


def agree(value: float) -> float:
    """The mean over the ranks."""
    total = hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Sum, name="agree")
    return float(total) / SIZE


def reduce(x: tf.Tensor, name: str) -> tf.Tensor:
    """The sum over the ranks."""
    return hvd.allreduce(x, op=hvd.Sum, name=name)


def _per_tensor(shapes: Sequence[Sequence[int]]) -> Callable[..., list[tf.Tensor]]:
    del shapes
    return lambda *x: [reduce(one, f"gradient{i}") for i, one in enumerate(x)]


def _grouped(shapes: Sequence[Sequence[int]]) -> Callable[..., list[tf.Tensor]]:
    del shapes
    return lambda *x: hvd.grouped_allreduce(list(x), op=hvd.Sum, name="grouped")


LISTS = {"per tensor": _per_tensor, "grouped": _grouped}


def begin(variables: list[Any]) -> None:
    """Gives every rank the variables of rank 0."""
    hvd.broadcast_variables(variables, root_rank=0)


def gradients(tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> Any:
    """The gradients, averaged over the ranks."""
    return hvd.DistributedGradientTape(tape).gradient(loss, variables)


end = hvd.shutdown
