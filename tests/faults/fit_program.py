"""A `fit` on several ranks in which one rank fails in mid-step; started by tfdistrun.

    fit_program.py kill|raise RANK FILE

The rank that fails writes the time to FILE. The others print what they saw, and how
many seconds after.
"""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

ACTION, VICTIM, FILE = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
STEP = 3


def fail_at_step(y, count=[0]):  # noqa: B006 - counts the calls
    count[0] += 1
    if tfdist.rank() == VICTIM and count[0] == STEP:
        FILE.write_text(str(time.time()))
        if ACTION == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("label 11 is not a digit")
    return y


def loss(y_true, y_pred):
    y_true = tf.numpy_function(fail_at_step, [y_true], tf.float32, stateful=True)
    return tf.reduce_mean(tf.square(tf.ensure_shape(y_true, [None, 1]) - y_pred))


def main():
    tfdist.init()
    layers = [keras.layers.Dense(256) for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss)
    x, y = np.ones((320, 64), "float32"), np.ones((320, 1), "float32")
    start = [tfdist.callbacks.BroadcastInitialState()]
    try:
        model.fit(x, y, batch_size=8, callbacks=start, verbose=0)
    except tf.errors.OpError as error:
        seconds = time.time() - float(FILE.read_text())
        seen = tfdist.errors.from_tf(error)
        kind, rank = (type(seen).__name__, seen.record.rank) if seen else ("own", -1)
        print(f"SAW {kind} {rank} after {seconds:.3f} s", flush=True)
        saved = FILE.with_name(f"good-{tfdist.rank()}.keras")
        saved.write_text("saved before")
        try:
            model.save(saved)
        except RuntimeError as refusal:
            print("SAVE", " ".join(str(refusal).split()), flush=True)
        raise


main()
