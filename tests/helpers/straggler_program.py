"""An elastic loop in which one process is slow, until another one has taken its place.

    tfdistrun -np 2 --min-np 1 python -m helpers.straggler_program FOLDER

The slow process is member 1. Each rank appends a line for each committed step to
FOLDER/commits, and the loop ends when member 2 has trained for some steps.
"""

import json
import os
import sys
import time
from pathlib import Path

STEP_S, SLOW_STEP_S, STEPS_TOGETHER = 0.01, 0.05, 30


def train(folder):
    import tensorflow as tf

    import tfdist

    tfdist.init()
    member = int(os.environ["TFDIST_MEMBER"])
    steps_done, is_over = tf.Variable(0.0), tf.Variable(0.0)

    @tf.function
    def run(wish):
        is_over.assign(tfdist.allreduce(wish, op=tfdist.ReduceOp.SUM))
        steps_done.assign_add(1.0)

    state = tfdist.elastic.State(steps_done, is_over)
    watch = tfdist.callbacks.Stragglers(seconds=0.5, replace=True)
    together = 0
    for _ in state.steps(100_000, stragglers=watch):
        time.sleep(SLOW_STEP_S if member == 1 else STEP_S)
        run(tf.constant(float(together >= STEPS_TOGETHER)))
        if not state.commit():
            continue
        together += member == 2
        line = {"member": member, "rank": tfdist.rank(), "size": tfdist.size()}
        with (folder / "commits").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if float(is_over) > 0:
            assert float(steps_done) == state.committed
            break
    (folder / f"end-{member}").touch()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
