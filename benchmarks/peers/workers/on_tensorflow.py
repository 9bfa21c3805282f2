"""One rank that reduces inside of TensorFlow, by the library that the task names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import measuring
import numpy as np
import tensorflow as tf
from exact import brought, check

FLOOR_BYTES = 64 << 10  # up to here a call costs more than its bytes

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


def _timed(call: Callable[[], object], by: Any, task: dict[str, Any]) -> list[float]:
    return measuring.measure(measuring.repeated(call), by.agree, task["cap_s"])


def _reduction(by: Any, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    # Of one argument, as the floor: each default costs a call of a tf.function 50 us.
    return lambda x: by.reduce(x, name)


def sizes(task: dict[str, Any], by: Any) -> dict[str, list[float]]:
    """One allreduce of each size in one call of a tf.function; small ones beside it.

    The floor is a tf.function of the same signature that has one Neg in it.
    """
    seconds = {}
    for size_bytes in task["sizes"]:
        x = tf.constant(brought(size_bytes // 4, by.RANK))
        call = by.function(_reduction(by, f"of{size_bytes}"))
        check(call(x).numpy(), by.SIZE, f"{size_bytes} bytes")
        calls = {"allreduce": lambda c=call, x=x: c(x)}
        if size_bytes <= FLOOR_BYTES:
            empty = tf.function(lambda x: -x)
            calls["floor"] = lambda f=empty, x=x: f(x)
            if eager := getattr(by, "eager", None):
                name = f"eager{size_bytes}"
                check(eager(x, name).numpy(), by.SIZE, name)
                calls["eager"] = lambda e=eager, x=x, n=name: e(x, n)
        repeats = {series: measuring.repeated(one) for series, one in calls.items()}
        found = measuring.in_turns(repeats, by.agree, task["cap_s"])
        check(call(x).numpy(), by.SIZE, f"{size_bytes} bytes, at the end")
        seconds |= {f"{series}/{size_bytes}": s for series, s in found.items()}
    return seconds


def gradients(task: dict[str, Any], by: Any) -> dict[str, list[float]]:
    """The whole list in one call of a tf.function, in each of the library's ways.

    The floor is a tf.function of the same signature that reduces nothing.
    """
    shapes = task["shapes"]
    counts = [int(np.prod(shape)) for shape in shapes]
    lists = [
        tf.constant(brought(count, by.RANK, shift=i).reshape(shape))
        for i, (count, shape) in enumerate(zip(counts, shapes, strict=True))
    ]
    seconds = {}
    for name, make in by.LISTS.items():
        call = by.function(make(shapes))
        for i, found in enumerate(call(*lists)):
            check(found.numpy(), by.SIZE, f"{name}, tensor {i}", shift=i)
        case = f"{name}/{4 * sum(counts)}"
        seconds[case] = _timed(lambda c=call: c(*lists), by, task)
    size_bytes = 4 * sum(counts)
    empty = tf.function(lambda *x: [tf.identity(one) for one in x])
    seconds[f"floor/{size_bytes}"] = _timed(lambda: empty(*lists), by, task)
    flat = tf.constant(brought(sum(counts), by.RANK))
    call = by.function(lambda x: by.reduce(x, "flat"))
    check(call(flat).numpy(), by.SIZE, "flat")
    seconds[f"flat/{size_bytes}"] = _timed(lambda: call(flat), by, task)
    return seconds


def main() -> None:
    """Measures."""
    task = measuring.task()
    by = importlib.import_module(f"by_{task['by']}")
    found = {"sizes": sizes, "gradients": gradients}[task["task"]](task, by)
    measuring.leave(task, by.RANK, by.SIZE, by.VERSIONS, found)
    by.end()


if __name__ == "__main__":
    main()
