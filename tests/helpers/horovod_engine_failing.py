"""Does what fails with TFDIST_ENGINE=horovod, and prints which error that was.

Started by tests/horovod_engine/test_launchers.py on two ranks.
"""

import os
import signal
import sys
import time

import tensorflow as tf

import tfdist


@tf.function
def step(x):
    return tfdist.allreduce(x, name="gradient")


def does(what, rank):
    if what == "kill":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            step(tf.ones([100]))
    elif what == "shape":
        step(tf.ones([100 + rank]))
    elif what == "deadline":
        if rank == 1:
            time.sleep(3)
        tfdist.allreduce(tf.ones([3]), timeout_s=1.0)
    elif what == "absent":
        if rank == 1:
            time.sleep(60)
        step(tf.ones([100]))
    elif what == "join":
        tfdist.join()
    elif what == "send":
        tfdist.send(tf.ones([3]), 1 - rank)
    elif what == "bfloat16":
        tfdist.allreduce(tf.ones([3], tf.bfloat16))


def main():
    tfdist.init()
    rank = tfdist.rank()
    for _ in range(3):
        step(tf.ones([100]))
    try:
        does(sys.argv[1], rank)
    except Exception as error:
        known = tfdist.errors.from_tf(error) or error
        blamed = getattr(getattr(known, "record", None), "rank", None)
        print(f"rank {rank}: {type(known).__name__} rank={blamed}", flush=True)
        raise


if __name__ == "__main__":
    main()
