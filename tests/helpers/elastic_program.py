"""An elastic training loop whose result shows each sample and each step that counted.

    tfdistrun -np 3 --min-np 2 python -m helpers.elastic_program FOLDER STEPS

`uses` counts how often each sample was used, and `order` is a number that depends on
the order of the steps; both are exact, whatever the number of ranks. Each rank appends
a line for each committed step to FOLDER/commits, and rank 0 writes FOLDER/result.npz.
A file FOLDER/kill-MEMBER-STEP-PLACE makes a member kill itself at this place of the
step: "before" its computation, "after" it or after its "commit". FOLDER/term-... sends
SIGTERM in the same way, and FOLDER/hang-MEMBER-STEP makes the step take ten minutes.
Each step that is undone adds a line to FOLDER/undone. If the job is preempted, each
rank appends a line to FOLDER/preempted, and rank 0 writes FOLDER/saved.npz. A rank that
gets to the end of the program creates FOLDER/end-MEMBER. If there is a file FOLDER/stop
with a number, all ranks leave the loop after so many steps. With a file FOLDER/table,
the ranks also train a table of 8 MiB, whose gradients are `tf.IndexedSlices`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

SAMPLES, GLOBAL_BATCH, SEED = 53, 10, 4
MODULUS = 65521
SLOW_STEP_S = 0.02


def expected(steps):
    """The result of an unfailed run: uses of each sample, order of the steps."""
    from tfdist.data import samples_of_step

    uses, order = np.zeros(SAMPLES), 0
    for step in range(steps):
        rows = samples_of_step(
            SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, step=step, rank=0, size=1
        )
        uses[rows] += 1
        order = (order * 31 + int(rows.sum()) + step) % MODULUS
    return uses, order


def _kill_if_asked(folder, member, step, place):
    wish = folder / f"kill-{member}-{step}-{place}"
    if wish.exists():
        wish.unlink()  # else its replacement would die of it too
        os.kill(os.getpid(), signal.SIGKILL)
    wish = folder / f"term-{member}-{step}-{place}"
    if wish.exists():
        wish.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    if (folder / f"hang-{member}-{step}").exists() and place == "before":
        (folder / "hangs").touch()
        time.sleep(600)


def _append(file, line):
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


def stops_after(folder, done):
    """Whether the test has asked for an end after so many steps, or epochs."""
    wish = folder / "stop"
    return wish.exists() and done == int(wish.read_text())


def train(folder, steps):
    import keras
    import tensorflow as tf

    import tfdist

    tfdist.init()
    member, size = int(os.environ["TFDIST_MEMBER"]), tfdist.size()
    uses = tf.Variable(tf.zeros([SAMPLES]), name="uses")
    order = tf.Variable(0, dtype=tf.int64, name="order")
    variables = [uses]
    if (folder / "table").exists():
        variables.append(tf.Variable(tf.zeros([1 << 16, 32]), name="table"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    traces = []

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)]
    )
    def run(rows, step):
        traces.append(1)
        with tfdist.DistributedGradientTape(op=tfdist.ReduceOp.SUM) as tape:
            loss = -sum(tf.reduce_sum(tf.gather(v, rows)) for v in variables)
        optimizer.apply(tape.gradient(loss, variables), variables)
        own = tf.reduce_sum(rows)
        total = tfdist.allreduce(own, op=tfdist.ReduceOp.SUM)
        order.assign((order * 31 + total + step) % MODULUS)

    state = tfdist.elastic.State(*variables, order, optimizer)
    commits = os.open(folder / "commits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def save(step):
        _append(folder / "preempted", {"member": member, "step": step})
        if tfdist.rank() == 0:
            arrays = {"uses": uses.numpy(), "order": int(order), "steps": step}
            np.savez(folder / "saved.npz", **arrays)

    is_newcomer = member >= size
    for step in state.steps(steps, on_preemption=save):
        rows = tfdist.data.samples_of_step(
            SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, step=step
        )
        place = (tfdist.rank(), tfdist.size())
        _kill_if_asked(folder, member, step, "before")
        run(tf.constant(rows), tf.constant(np.array(step)))  # TensorFlow keeps numbers
        _kill_if_asked(folder, member, step, "after")
        if not state.commit():
            if not is_newcomer:  # not a rehearsal
                _append(folder / "undone", {"member": member, "step": step})
            is_newcomer = False
            continue
        line = {
            **{"member": member, "step": step, "rank": place[0], "size": place[1]},
            **{"pid": os.getpid(), "time_s": time.monotonic()},
        }
        os.write(commits, (json.dumps(line) + "\n").encode())
        _kill_if_asked(folder, member, step, "commit")
        if tfdist.size() < size or (folder / "slow").exists():
            time.sleep(SLOW_STEP_S)
        if stops_after(folder, step + 1):
            steps = step + 1
            break
    assert len(traces) == 1, f"traced {len(traces)} times"
    if tfdist.rank() == 0:
        arrays = {"uses": uses.numpy(), "order": int(order), "steps": steps}
        np.savez(folder / "result.npz", **arrays)
    (folder / f"end-{member}").touch()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
