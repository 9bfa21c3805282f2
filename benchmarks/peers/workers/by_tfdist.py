"""tfdist for the workers; benchmarks/peers/README.md describes `by_` modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.core import native
from tfdist.core.timeline import exposed_communication
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.reduction import reduce_gradients

tfdist.init()
RANK, SIZE = tfdist.rank(), tfdist.size()
VERSIONS = {
    "tfdist": str(native.build_info()["version"]),
    "tensorflow": tf.__version__,
    "keras": tf.keras.__version__,
}
SUM = tfdist.ReduceOp.SUM
function: Callable[..., Any] = tf.function
scope = contextlib.nullcontext


def agree(value: float) -> float:
    """The mean over the ranks."""
    return float(tfdist.allreduce(tf.constant(value, tf.float64), name="agree"))


def reduce(x: tf.Tensor, name: str) -> tf.Tensor:
    """The sum over the ranks."""
    return tfdist.allreduce(x, op=SUM, name=name)


eager = reduce


def _buckets(shapes: Sequence[Sequence[int]]) -> Callable[..., list[tf.Tensor]]:
    variables = [
        tf.Variable(tf.zeros(shape), name=f"gradient{i}")
        for i, shape in enumerate(shapes)
    ]
    options = ReduceOptions(SUM)
    return lambda *x: reduce_gradients(list(x), variables, options)


def _grouped(shapes: Sequence[Sequence[int]]) -> Callable[..., list[tf.Tensor]]:
    del shapes
    return lambda *x: tfdist.grouped_allreduce(list(x), op=SUM, name="grouped")


LISTS = {"buckets": _buckets, "grouped": _grouped}


def begin(variables: list[Any]) -> None:
    """Gives every rank the variables of rank 0."""
    tfdist.broadcast_variables(variables)


def gradients(tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> Any:
    """The gradients, averaged over the ranks."""
    return tfdist.DistributedGradientTape(tape).gradient(loss, variables)


def in_fit(optimizer: Any) -> tuple[Any, list[Any]]:
    """The optimizer and the callbacks of `model.fit`."""
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    return tfdist.DistributedOptimizer(optimizer), callbacks


class Watch:
    """Measures what communication costs a step: processor time and exposed time."""

    def __init__(self) -> None:
        native.take_records()
        self._begin_s = self._cpu_s()

    def facts(self, steps: int) -> dict[str, float]:
        """Means over `steps` steps."""
        exposed_s = 1e-6 * exposed_communication.exposed_us(native.take_records())
        cpu_s = self._cpu_s() - self._begin_s
        return {
            "communication_cpu_s": cpu_s / steps,
            "exposed_s": exposed_s / steps,
        }

    def _cpu_s(self) -> float:
        """Processor seconds of the core's threads, to the nanosecond."""
        total_ns = 0
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().startswith("tfdist-"):
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return 1e-9 * total_ns


end = tfdist.shutdown
