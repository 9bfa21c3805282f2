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
    # One argument, like the floor: each default argument adds 50 us to a call.
    return lambda x: by.reduce(x, name)


def sizes(task: dict[str, Any], by: Any) -> dict[str, list[float]]:
    """One allreduce of each size in a tf.function; small ones also eager, with a floor.

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


def _made(reduce_list: Callable[..., Any]) -> Callable[..., Any]:
    # Like a backward pass: the memory of the inputs may be reused for the results.
    return lambda *x: reduce_list(*[-one for one in x])


def gradients(task: dict[str, Any], by: Any) -> dict[str, list[float]]:
    """The whole list in one call of a tf.function, in each of the library's ways.

    The floor is a tf.function of the same signature that reduces nothing. In "made",
    the function makes the tensors that it reduces; "made floor", in turns with it, only
    makes them.
    """
    shapes = task["shapes"]
    counts = [int(np.prod(shape)) for shape in shapes]
    size_bytes = 4 * sum(counts)
    lists = [
        tf.constant(brought(count, by.RANK, shift=i).reshape(shape))
        for i, (count, shape) in enumerate(zip(counts, shapes, strict=True))
    ]
    negative = [-one for one in lists]
    making = tf.function(lambda *x: [-one for one in x])
    making(*negative)
    seconds = {}
    for name, make in by.LISTS.items():
        call = by.function(make(shapes))
        made = by.function(_made(make(shapes)))
        for what, results in ((name, call(*lists)), (f"{name}, made", made(*negative))):
            for i, found in enumerate(results):
                check(found.numpy(), by.SIZE, f"{what}, tensor {i}", shift=i)
        seconds[f"{name}/{size_bytes}"] = _timed(lambda c=call: c(*lists), by, task)
        repeats = {
            f"{name}, made": measuring.repeated(lambda c=made: c(*negative)),
            f"{name}, made floor": measuring.repeated(lambda: making(*negative)),
        }
        in_turns = measuring.in_turns(repeats, by.agree, task["cap_s"])
        seconds |= {f"{case}/{size_bytes}": s for case, s in in_turns.items()}
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
