"""How well an order of buckets fits the times at which gradients are really ready.

    python benchmarks/gradient_order.py [--processes 3] [--steps 20]

Each process trains the models below by itself, every gradient in a bucket of its own
(TFDIST_FUSION_BYTES=0), so that the core's records tell when each was ready. From these
times, the script computes for buckets in a given order which percentage of the
communication would delay the step if reducing took as long as the backward pass. The
orders: the reverse of the list, the graph's levels (TFDIST_BUCKET_ORDER=traced), and
the order in which gradients were ready in the first five steps of the same process, or
of another one. Only later steps are evaluated. See docs/design/0008-observed-order.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LEARNED_STEPS = 5


def models() -> Iterator[tuple[str, Callable[[Any], Any], list[Any], Any]]:
    """Name, function, variables as they would be listed, and a batch."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    batch = tf.random.normal((256, 512))

    def weight(rows: int, columns: int) -> Any:
        return tf.Variable(tf.random.normal((rows, columns)) / rows**0.5)

    def chain(order: Sequence[int], v: list[Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            for place in order:
                x = tf.nn.relu(x @ v[place])
            return x

        return call

    square = [weight(512, 1024)] + [weight(1024, 1024) for _ in range(7)]
    yield "in the order of use", chain(range(8), square), square, batch
    last_first = square[-1:] + square[:-1]
    yield (
        "last layer listed first",
        chain([*range(1, 8), 0], last_first),
        last_first,
        batch,
    )
    v = [weight(512, 512) for _ in range(28)]
    pairs = [*range(0, 28, 2), *reversed(range(1, 28, 2))]
    yield "encoder and decoder in pairs", chain(pairs, v), v, batch
    wide, narrow = square, [weight(512, 512) for _ in range(10)]

    def towers(x: Any) -> Any:
        one, other = chain(range(8), wide)(x), chain(range(10), narrow)(x)
        return tf.concat([one, other], 1)

    yield "two towers", towers, [*wide, *narrow], batch
    table, layers = weight(512, 1000), [weight(512, 512) for _ in range(24)]

    def tied(x: Any) -> Any:
        x = (x @ table) @ tf.transpose(table)
        return chain(range(24), layers)(x) @ table

    yield "one table at both ends", tied, [*layers[:12], table, *layers[12:]], batch
    resnet = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))
    pictures = tf.random.normal((4, 64, 64, 3))
    yield "ResNet-50", resnet, [w.value for w in resnet.trainable_variables], pictures


def times_of(
    call: Callable[[Any], Any], v: list[Any], batch: Any, steps: int
) -> dict[str, Any]:
    """Ready times of the gradients of each step, in us after the step's first one."""
    import tensorflow as tf

    from tfdist.core import native
    from tfdist.gradients import reduction
    from tfdist.gradients.graph_levels import levels_of

    levels: list[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(call(x)))
        grads = tape.gradient(loss, v)
        levels[:] = levels_of(grads)
        return [tf.reduce_sum(g) for g in reduction.reduce_gradients(grads, v)]

    for _ in range(3):
        step(batch)
    runs = []
    for _ in range(steps):
        native.take_records()
        step(batch)
        at_us = {
            int(row["name"].split("#")[0].split(".")[2]): row["submitted_us"]
            for row in native.take_records()
            if row["name"].startswith("gradients.")
        }
        first_us = min(at_us.values())
        runs.append([at_us[len(v) - 1 - i] - first_us for i in range(len(v))])
    sizes = [w.shape.num_elements() * 4 for w in v]
    return {"runs": runs, "levels": levels, "sizes": sizes}


def record(steps: int, path: Path) -> None:
    """Writes the times of all models in this process."""
    import tfdist

    tfdist.init()
    found = {name: times_of(call, v, batch, steps) for name, call, v, batch in models()}
    path.write_text(json.dumps(found))
    tfdist.shutdown()


def exposed(
    order: Sequence[int], sizes: Sequence[int], runs: Sequence[Sequence[int]]
) -> float:
    """Percent of the communication that a step waits for; the median of the steps."""
    from tfdist.gradients.bucketing import cut_buckets

    limits = {"first_bytes": 1 << 20, "bucket_bytes": 8 << 20, "fusion_bytes": 64 << 20}
    buckets = cut_buckets(sizes, ["f"] * len(sizes), order=order, **limits)
    shares = []
    for at_us in runs:
        us_for_a_byte = max(at_us) / sum(sizes)
        end_us = 0.0
        for ready_us, size_bytes in sorted(
            (max(at_us[i] for i in one), sum(sizes[i] for i in one)) for one in buckets
        ):
            end_us = max(end_us, ready_us) + size_bytes * us_for_a_byte
        shares.append(100 * (end_us - max(at_us)) / max(at_us))
    return statistics.median(shares)


def learned(runs: Sequence[Sequence[int]]) -> list[int]:
    """The order in which gradients were ready, by the median of their times."""
    medians = [statistics.median(times) for times in zip(*runs, strict=True)]
    return sorted(reversed(range(len(medians))), key=medians.__getitem__)


def report(found: Sequence[dict[str, Any]]) -> None:
    """Prints for each model and order the range over the processes."""
    from tfdist.gradients.ready_order import order_of

    for name, first in found[0].items():
        sizes = first["sizes"]
        rows: dict[str, list[float]] = {}
        for number, own in enumerate(result[name] for result in found):
            other = found[(number + 1) % len(found)][name]["runs"]
            orders = {
                "list": range(len(sizes))[::-1],
                "levels": order_of(own["levels"]),
                "own first steps": learned(own["runs"][:LEARNED_STEPS]),
                "first steps of another process": learned(other[:LEARNED_STEPS]),
            }
            for kind, order in orders.items():
                share = exposed(order, sizes, own["runs"][LEARNED_STEPS:])
                rows.setdefault(kind, []).append(share)
        shares = ", ".join(
            f"{kind} {min(of):.0f}-{max(of):.0f}" for kind, of in rows.items()
        )
        print(f"{name} ({len(sizes)} gradients, {sum(sizes) / 1e6:.0f} MB): {shares}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.steps, options.record)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.json" for i in range(options.processes)]
        for path in paths:
            command = [sys.executable, __file__, "--record", str(path)]
            subprocess.run(
                [*command, "--steps", str(options.steps)],
                env={**os.environ, "TFDIST_FUSION_BYTES": "0"},
                check=True,
                timeout=600,
            )
        report([json.loads(path.read_text()) for path in paths])


if __name__ == "__main__":
    main()
