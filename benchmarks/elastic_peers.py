"""Measures how long a training pauses when a rank is killed: tfdist, torchrun, torchft.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch torchft numpy
    python benchmarks/elastic_peers.py --torch-python /tmp/torch/bin/python

In each round, every launcher runs a training of three ranks with a small model, whose
steps take about 20 ms, and one of the ranks (not rank 0) is killed. Reported are the
seconds from the kill to the first completed step after the interrupted one, and to the
first step in which three ranks take part again: the medians of the rounds, and their
ranges. For tfdist, a third time is what the replacement needs to import TensorFlow and
to trace its step; the rest of the second time is what tfdist adds.

tfdist repeats the step with two ranks, or with a spare, while a replacement starts.
torchrun restarts all ranks (`--max-restarts`); they continue from a checkpoint, which
rank 0 saves after each step. In torchft, each rank is a replica group of its own, with
a lighthouse; the killed one is started again at once, as a supervisor would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEPS_BEFORE, LIMIT_S = 3, 50, 120.0
STEP_S = 0.02
COLUMNS = ("next step", "all ranks", "import and trace")

TFDIST = f"""
import json, os, sys, time
started_s = time.monotonic()
import keras, numpy as np, tensorflow as tf, tfdist
tfdist.init()
x = np.random.default_rng(0).standard_normal((600, 64)).astype("float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)

@tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float32)])
def step_with(rows):
    with tfdist.DistributedGradientTape() as tape:
        loss = tf.reduce_mean(model(rows) ** 2)
    grads = tape.gradient(loss, model.trainable_variables, weight=tf.shape(rows)[0])
    optimizer.apply(grads, model.trainable_variables)
    with open(sys.argv[1] + ".traced", "a") as log:  # runs when the step is traced
        log.write(f"{{time.monotonic() - started_s}}\\n")

state = tfdist.elastic.State(model, optimizer)
for step in state.steps(10**9):
    rows = tfdist.data.samples_of_step(len(x), global_batch=60, seed=1, step=step)
    step_with(x[rows])
    time.sleep({STEP_S})
    if state.commit():
        with open(sys.argv[1], "a") as log:
            line = [time.monotonic(), step, tfdist.rank(), tfdist.size(), os.getpid()]
            log.write(json.dumps(line) + "\\n")
"""

TORCHRUN = f"""
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
rank, size, first = dist.get_rank(), dist.get_world_size(), 0
file = sys.argv[1] + ".pt"
if os.path.exists(file):
    saved = torch.load(file)
    first = saved["step"] + 1
    model.load_state_dict(saved["model"])
for step in range(first, 10**9):
    x = torch.randn(20, 64)
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()
    time.sleep({STEP_S})
    if rank == 0:
        torch.save({{"step": step, "model": model.state_dict()}}, file + ".new")
        os.replace(file + ".new", file)
    with open(sys.argv[1], "a") as log:
        line = [time.monotonic(), step, rank, size, os.getpid()]
        log.write(json.dumps(line) + "\\n")
"""

TORCHFT = f"""
import json, os, sys, time
from datetime import timedelta
import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
torch.manual_seed(0)
torch.set_num_threads(1)
group = int(os.environ["REPLICA_GROUP_ID"])
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
inner = torch.nn.Linear(64, 64)
plain = torch.optim.SGD(inner.parameters(), 0.01)
def load(state):
    inner.load_state_dict(state["m"])
    plain.load_state_dict(state["o"])

manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {{"m": inner.state_dict(), "o": plain.state_dict()}},
    replica_id=f"group_{{group}}_",
    timeout=timedelta(seconds=10),
    rank=0,
    world_size=1,
)
model, optimizer = DistributedDataParallel(manager, inner), Optimizer(manager, plain)
while True:
    x = torch.randn(20, 64)
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    before = manager.current_step()
    optimizer.step()
    time.sleep({STEP_S})
    if manager.current_step() > before:
        with open(sys.argv[1], "a") as log:
            size = manager.num_participants()
            line = [time.monotonic(), before, group, size, os.getpid()]
            log.write(json.dumps(line) + "\\n")
"""


class Training:
    """A training whose steps are read from a file.

    Args:
        file: its lines are [time in seconds, step, rank, number of ranks, process id].
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def rows(self) -> list[tuple[float, int, int, int, int]]:
        """The steps so far."""
        text = self.file.read_text() if self.file.exists() else ""
        complete, _, _ = text.rpartition("\n")
        return [tuple(json.loads(line)) for line in complete.splitlines()]

    def wait(self, holds: Callable[[list], bool]) -> None:
        """Waits for a condition on the rows.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + LIMIT_S
        while not holds(self.rows()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks did not get that far in {LIMIT_S:g} s")
            time.sleep(0.05)

    def pause(self, restart: Callable[[], None] | None = None) -> tuple[float, float]:
        """Kills a rank; returns seconds to the next step, and to one of all ranks."""
        self.wait(
            lambda rows: (
                {row[2] for row in rows} == {*range(RANKS)}
                and rows[-1][1] >= STEPS_BEFORE
                and rows[-1][3] == RANKS
            )
        )
        victim = [row for row in self.rows() if row[2] == RANKS - 1][-1]
        killed_s = time.monotonic()
        os.kill(victim[4], signal.SIGKILL)
        if restart is not None:
            restart()
        last = max(row[1] for row in self.rows() if row[0] <= killed_s)

        def later(rows: list, *, by_all: bool) -> list[float]:
            new = [row for row in rows if row[0] > killed_s and row[1] > last + 1]
            if by_all:  # as the process that takes the victim's place sees it
                new = [row for row in new if row[3] == RANKS and row[2] == RANKS - 1]
            return [row[0] - killed_s for row in new]

        self.wait(lambda rows: bool(later(rows, by_all=True)))
        rows = self.rows()
        return min(later(rows, by_all=False)), min(later(rows, by_all=True))


@contextlib.contextmanager
def _started(command: list[str], folder: Path, **environ: str) -> Iterator[None]:
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)


def run_tfdist(folder: Path, python: str, *options: str) -> tuple[float, ...]:
    """One training under tfdistrun."""
    del python
    file = folder / "steps"
    command = [sys.executable, "-m", "tfdist.launch", "-np", str(RANKS)]
    command += ["--min-np", "1", *options, sys.executable, "-c", TFDIST, str(file)]
    with _started(command, folder):
        if "--spares" in options:
            Training(file).wait(lambda _: len(_traced_s(folder)) > RANKS)
            time.sleep(2.0)  # the spare is ready
        pauses_s = Training(file).pause()
    return *pauses_s, _traced_s(folder)[-1]


def _traced_s(folder: Path) -> list[float]:
    """Seconds for import and trace, of each process that has traced its step."""
    file = folder / "steps.traced"
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def run_tfdist_with_spare(folder: Path, python: str) -> tuple[float, ...]:
    """One training under tfdistrun, with a spare, which has traced its step before."""
    return run_tfdist(folder, python, "--spares", "1")[:2]


def run_torchrun(folder: Path, python: str) -> tuple[float, float]:
    """One training under torchrun."""
    file, program = folder / "steps", folder / "train.py"
    program.write_text(TORCHRUN)
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "9"]
    environ = {"OMP_NUM_THREADS": "1"}
    # Otherwise gloo (in PyTorch 2.13) finds the addresses of the ranks that have ended.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with _started([*command, str(program), str(file)], folder, **environ):
        return Training(file).pause()


def run_torchft(folder: Path, python: str) -> tuple[float, float]:
    """One training of replica groups with torchft."""
    file, program = folder / "steps", folder / "train.py"
    program.write_text(TORCHFT)
    lighthouse = [str(Path(python).parent / "torchft_lighthouse")]
    lighthouse += ["--min_replicas", "1", "--join_timeout_ms", "1000"]
    lighthouse += ["--bind", "127.0.0.1:29510"]
    environ = {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_started(lighthouse, folder))

        def start(group: int) -> None:
            one = {**environ, "REPLICA_GROUP_ID": str(group)}
            command = [python, str(program), str(file)]
            stack.enter_context(_started(command, folder, **one))

        for group in range(RANKS):
            start(group)
        return Training(file).pause(restart=lambda: start(RANKS - 1))


WAYS = {
    "tfdist": run_tfdist,
    "tfdist --spares 1": run_tfdist_with_spare,
    "torchrun": run_torchrun,
    "torchft": run_torchft,
}


def main() -> int:
    """Runs the rounds, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-python", required=True, help="a Python with torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    options = parser.parse_args()
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in options.ways}
    for number in range(options.rounds):
        for way in options.ways:
            with tempfile.TemporaryDirectory(prefix="tfdist-peers-") as name:
                try:
                    times = WAYS[way](Path(name), options.torch_python)
                except TimeoutError as error:
                    said = (Path(name) / "output").read_text()[-500:]
                    print(f"{way}: {error}; {said}", flush=True)
                    continue
            found[way].append(times)
            shown = ", ".join(f"{seconds:.2f} s" for seconds in times)
            print(f"round {number}, {way}: {shown}", flush=True)
    for way, times in found.items():
        if times:
            columns = [sorted(column) for column in zip(*times, strict=True)]
            shown = ", ".join(
                f"{name} {statistics.median(c):6.2f} s ({c[0]:.2f} to {c[-1]:.2f})"
                for name, c in zip(COLUMNS, columns, strict=False)
            )
            print(f"{way:18} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
