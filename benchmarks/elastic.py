"""Measures the cost of elastic training, and a job whose ranks are killed.

    python benchmarks/elastic.py cost [--rounds 7]  # with commits and without, in turn
    python benchmarks/elastic.py kills [--seconds 60] # draws docs/images/elastic.svg

`cost` trains on two ranks, in rounds of plain and of elastic steps. Plain steps update
variables in place and do not commit. Elastic steps commit, and update variables out of
place, because the last commit refers to their old values. Each kind of step has its own
optimizer. "cnn" is the model of the README.
"resnet50" has the variables of ResNet-50 and SGD with momentum, but no backward pass:
its step is the reduction and the update, so the share of the commits is larger than in
a training. "fit" trains the CNN with `model.fit`, in a job with `Elastic` between two
jobs without it, whose ratio is the control. Reported: the median of the rounds' ratios,
and their range.

`kills` trains the CNN on three ranks and kills rank 0 twice. The picture
shows the images per second and the number of ranks over time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "benchmarks")]
IMAGE = ROOT / "docs" / "images" / "elastic.svg"
STEPS = {"cnn": 200, "resnet50": 20}  # of a loop, in each round
FIT_EPOCHS = 6  # the first one traces
BATCH = 64
KILLS = 2
MANY_STEPS = 10**9
Step = Callable[[int], Any]
CHOICES = ("cost", "kills", "cost-rank", "fit-rank", "kills-rank")
BIN_S = 0.5
WIDTH, HEIGHT, MARGIN = 760, 220, 24
COLORS = {3: "#e07000", 2: "#4878a8"}


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=CHOICES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--model", choices=list(STEPS))
    options = parser.parse_args()
    if options.what == "cost":
        for name in STEPS:
            own = ("--model", name, "--rounds", str(options.rounds))
            launch(2, "cost-rank", *own).wait()
        measure_cost_of_fit(options.rounds)
    elif options.what == "cost-rank":
        measure_cost(options.model, options.rounds)
    elif options.what == "fit-rank":
        fit(options.folder)
    elif options.what == "kills":
        run_with_kills(options.seconds)
    else:
        train_until_killed(options.folder)
    return 0


def launch(ranks: int, *words: str, is_elastic: bool = True) -> subprocess.Popen[bytes]:
    """Starts a job of this file."""
    tfdistrun = [sys.executable, "-m", "tfdist.launch", "-np", str(ranks)]
    own = [sys.executable, str(Path(__file__).resolve()), *words]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
    tfdistrun += ["--min-np", "1"] if is_elastic else []
    return subprocess.Popen([*tfdistrun, *own], env=environ)


# ---- cost ----


def measure_cost(name: str, rounds: int) -> None:
    """On each rank: plain and elastic steps, in one loop."""
    import tfdist

    tfdist.init()
    plain, elastic, state_of = cnn() if name == "cnn" else resnet50()
    state = tfdist.elastic.State(*state_of)
    numbers = state.steps((rounds + 1) * 2 * (STEPS[name] + 2))
    ratios = []
    for number in range(rounds + 1):  # the first one traces
        kinds = [(plain, lambda: None), (elastic, state.commit)]
        seconds = {}
        for step, commit in kinds if number % 2 else reversed(kinds):
            seconds_of(step, numbers, 1, state.commit)
            # Not timed: the first step after a commit copies what the snapshot keeps.
            seconds_of(step, numbers, 1, commit)
            seconds[step] = seconds_of(step, numbers, STEPS[name], commit)
        if number > 0:
            plain_s, elastic_s = seconds[plain], seconds[elastic]
            ratios.append(elastic_s / plain_s)
            report(name, plain_s, elastic_s, ratios)
    assert not list(numbers)


def seconds_of(
    step: Step,
    numbers: Iterator[int],
    count: int,
    commit: Callable[[], Any],
) -> float:
    """Times some steps; all ranks begin them together."""
    import tfdist

    tfdist.barrier()
    begin_s = time.perf_counter()
    for number in itertools.islice(numbers, count):
        step(number)
        commit()
    return time.perf_counter() - begin_s


def report(
    name: str, plain_s: float, elastic_s: float, ratios: Sequence[float]
) -> None:
    """Prints a round on rank 0."""
    import tfdist

    if tfdist.rank() == 0:
        plain_ms, elastic_ms = (1e3 * s / STEPS[name] for s in (plain_s, elastic_s))
        print(
            f"{name}: {plain_ms:.2f} ms a step, with commits {elastic_ms:.2f} ms, "
            f"ratio {ratios[-1]:.3f}; median of {len(ratios)}: "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def cnn() -> tuple[Step, Step, list[Any]]:
    """The model of the README: two steps on this rank's part of a batch, and the state.

    The optimizer of the second step belongs to the state.
    """
    import keras
    import mnist_data
    import tensorflow as tf
    from mnist_fit import build_model

    import tfdist

    images, labels = mnist_data.load().train
    model = build_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    tfdist.broadcast_variables(model.weights)

    def step_of(adam: keras.optimizers.Optimizer) -> Step:
        adam.build(model.trainable_variables)
        tfdist.broadcast_variables(adam.variables)

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 28, 28, 1], tf.float32),
                tf.TensorSpec([None], tf.int32),
            ]
        )
        def train_step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tfdist.DistributedGradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            variables = model.trainable_variables
            grads = tape.gradient(loss, variables, weight=tf.shape(x)[0])
            adam.apply(grads, variables)

        def step(number: int) -> None:
            rows = tfdist.data.samples_of_step(
                len(images), global_batch=BATCH, seed=1, step=number
            )
            train_step(images[rows], labels[rows])

        return step

    plain, own = (keras.optimizers.Adam(1e-3) for _ in range(2))
    return step_of(plain), step_of(own), [model, own]


def resnet50() -> tuple[Step, Step, list[Any]]:
    """Variables like ResNet-50's: steps reduce their gradients and update them.

    The optimizer of the second step belongs to the state.
    """
    import keras
    import tensorflow as tf
    from resnet50 import gradient_shapes

    import tfdist

    variables = [tf.Variable(tf.ones(shape)) for shape in gradient_shapes()]

    def step_of(sgd: keras.optimizers.Optimizer) -> Step:
        sgd.build(variables)

        @tf.function(jit_compile=False)
        def train_step() -> None:
            with tfdist.DistributedGradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v) for v in variables])
            sgd.apply(tape.gradient(loss, variables), variables)

        return lambda _: train_step()

    plain, own = (keras.optimizers.SGD(1e-4, momentum=0.9) for _ in range(2))
    return step_of(plain), step_of(own), [own, *variables]


def measure_cost_of_fit(rounds: int) -> None:
    """Runs jobs with Elastic, each between two jobs without it."""
    ratios, controls = [], []
    for _ in range(rounds):
        before, elastic, after = (
            ms_of_fit(is_elastic=kind) for kind in (False, True, False)
        )
        ratios.append(2 * elastic / (before + after))
        controls.append(after / before)
        print(
            f"fit: {before:.2f} and {after:.2f} ms a step, elastic {elastic:.2f} ms, "
            f"ratio {ratios[-1]:.3f}, control {controls[-1]:.3f}; median of "
            f"{len(ratios)}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f})",
            flush=True,
        )


def ms_of_fit(*, is_elastic: bool) -> float:
    """Runs a job of `fit`, and returns the milliseconds of a step."""
    with tempfile.TemporaryDirectory() as name:
        job = launch(2, "fit-rank", "--folder", name, is_elastic=is_elastic)
        if job.wait() != 0:
            raise RuntimeError("the job failed")
        return float((Path(name) / "ms").read_text())


def fit(folder: Path) -> None:
    """On each rank: fits the CNN; rank 0 writes the time of a step."""
    import keras
    import mnist_data
    from mnist_fit import build_model

    import tfdist

    tfdist.init()
    keras.utils.set_random_seed(1)
    begins_s: list[float] = []
    at_epoch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins_s.append(time.perf_counter())
    )
    ours = [tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()]
    if "TFDIST_MEMBER" in os.environ:
        ours.append(tfdist.callbacks.Elastic())
    digits = mnist_data.load().train
    model = build_model()
    adam = keras.optimizers.Adam(1e-3)
    model.compile(
        tfdist.DistributedOptimizer(adam),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    train = tfdist.data.global_batches(digits, global_batch=BATCH)
    callbacks = [*ours, at_epoch]
    model.fit(train, epochs=FIT_EPOCHS, callbacks=callbacks, verbose=0)
    if tfdist.rank() == 0:
        # All epochs but the first, which traces, and the last.
        seconds = [b - a for a, b in itertools.pairwise(begins_s)][1:]
        ms = 1e3 * statistics.median(seconds) / len(train)
        (folder / "ms").write_text(str(ms))


# ---- kills ----


def train_until_killed(folder: Path) -> None:
    """On each rank: trains, and rank 0 writes a line for each committed step."""
    import tfdist

    tfdist.init()
    _, step, state_of = cnn()
    state = tfdist.elastic.State(*state_of)
    lines = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in state.steps(MANY_STEPS):
        row = {"size": tfdist.size(), "pid": os.getpid(), "step": number}
        step(number)
        if state.commit() and tfdist.rank() == 0:
            row["time_s"] = time.monotonic()
            os.write(lines, (json.dumps(row) + "\n").encode())


def run_with_kills(seconds: float) -> None:
    """Runs a job, kills rank 0 now and then, and draws the picture."""
    with tempfile.TemporaryDirectory() as name:
        job = launch(3, "kills-rank", "--folder", name)
        steps = Path(name) / "steps"
        while not steps.exists():
            if job.poll() is not None:
                raise SystemExit(f"the job ended at its start, with {job.returncode}")
            time.sleep(0.1)
        begin_s = time.monotonic()
        kills_s = [seconds * (2 * n + 1) / (2 * KILLS) for n in range(KILLS)]
        for kill_s in kills_s:
            time.sleep(max(0.0, begin_s + kill_s - time.monotonic()))
            latest = json.loads(steps.read_text().splitlines()[-1])
            os.kill(latest["pid"], signal.SIGKILL)
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        job.send_signal(signal.SIGTERM)
        job.wait()
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
    at_s = [row["time_s"] - begin_s for row in rows]
    sizes = [row["size"] for row in rows]
    IMAGE.write_text(picture(at_s, sizes, kills_s, seconds))
    gaps = sorted(b - a for a, b in zip(at_s, at_s[1:], strict=False))[-2 * KILLS :]
    print(f"the longest gaps between two steps: {[round(gap, 2) for gap in gaps]} s")
    print(f"the picture: {IMAGE.relative_to(ROOT)}")


def picture(
    at_s: Sequence[float], sizes: Sequence[int], kills_s: Sequence[float], end_s: float
) -> str:
    """Returns an SVG of images per second, in bins, with ranks and kills.

    Args:
        at_s: when each step was committed.
        sizes: number of ranks of each step.
        kills_s: when a rank was killed.
        end_s: length of the run.
    """
    bins = [0] * round(end_s / BIN_S)
    ranks = [0] * len(bins)
    for when_s, size in zip(at_s, sizes, strict=True):
        place = int(when_s / BIN_S)
        if 0 <= place < len(bins):
            bins[place] += BATCH
            ranks[place] = size
    most = max(bins)
    width = (WIDTH - 2 * MARGIN) / len(bins)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13">'
        '<rect width="100%" height="100%" fill="white"/>'
    ]
    full = HEIGHT - 3 * MARGIN
    for place, (images, size) in enumerate(zip(bins, ranks, strict=True)):
        height = full * images / most
        x, y = MARGIN + place * width, HEIGHT - MARGIN - height
        color = COLORS.get(size, "#a0a0a0")
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{color}"/>'
        )
    for kill_s in kills_s:
        x = MARGIN + (WIDTH - 2 * MARGIN) * kill_s / end_s
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{1.5 * MARGIN}" '
            f'y2="{HEIGHT - MARGIN}" stroke="#c00000" stroke-dasharray="4"/>'
            f'<text x="{x:.1f}" y="{1.3 * MARGIN}" text-anchor="middle">kill -9</text>'
        )
    for number, (size, color) in enumerate(COLORS.items()):
        x = MARGIN + 90 * number
        parts.append(
            f'<rect x="{x}" y="6" width="12" height="12" fill="{color}"/>'
            f'<text x="{x + 18}" y="17">{size} ranks</text>'
        )
    rate = most / BIN_S
    parts.append(
        f'<text x="{WIDTH - MARGIN}" y="17" text-anchor="end">highest bar: {rate:.0f} '
        f'images/s</text><text x="{MARGIN}" y="{HEIGHT - 8}">0 s</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">{end_s:.0f} s'
        "</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
