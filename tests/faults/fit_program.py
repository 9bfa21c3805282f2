"""A `fit` on several ranks in which one rank fails in mid-step; started by tfdistrun.

    fit_program.py kill|raise RANK FILE

    fit_program.py interrupt -1 FILE

The rank that fails writes the time to FILE. The others print what they saw, how many
seconds after, and why saving was refused, or what was saved. With "interrupt" none
fails, and all train until Ctrl-C.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from helpers.launcher import holdings

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


class Holding(keras.callbacks.Callback):
    """Prints, in the middle of the job, what must not be left after it."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            own = holdings()
            print("HOLDS", json.dumps([*map(sorted, (own.ports, own.memory))]))
            sys.stdout.flush()


def main():
    tfdist.init()
    layers = [keras.layers.Dense(256) for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss)
    x, y = np.ones((320, 64), "float32"), np.ones((320, 1), "float32")
    start = [tfdist.callbacks.BroadcastInitialState(), Holding()]
    epochs = 10_000 if ACTION == "interrupt" else 1
    try:
        model.fit(x, y, batch_size=8, epochs=epochs, callbacks=start, verbose=0)
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
        else:
            state = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
            digest = hashlib.sha256(b"".join(x.tobytes() for x in state)).hexdigest()
            step = seen.record.committed_step if seen else "of its own"
            print("SAVED", digest, "step", step, flush=True)
        raise


main()
