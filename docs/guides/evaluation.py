"""
Title: Evaluating on several processes
Author: the authors of tfdist
Date created: 2026/11/22
Last modified: 2026/11/22
Description: Metrics and predictions that are those of one process, in a part of the time.
"""

"""
## Introduction

An evaluation can be distributed over the ranks, so that each rank uses a part of the
data. The results should be the same as in one process that uses all data. This guide
shows what goes wrong if you combine the results manually, and how to get exact results.

```shell
tfdistrun -np 2 python docs/guides/evaluation.py
```

## A model to evaluate

The data are 1,797 digits of 8x8 pixels, from a file of the package scikit-learn. The
small model is trained as in `fit.py` in this folder. F1 is a metric that is not a mean
over the samples.
"""

import hashlib
import importlib.util
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

tfdist.init()
keras.utils.set_random_seed(1)

GLOBAL_BATCH, EPOCHS, TEST = 64, 4, 797

package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
rows = np.random.default_rng(0).permutation(rows)
images = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16).astype("float32")
digits = keras.utils.to_categorical(rows[:, -1], 10)
x, y = images[:TEST], digits[:TEST]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=tfdist.DistributedOptimizer(keras.optimizers.Adam(3e-3)),
    loss="categorical_crossentropy",
    metrics=["accuracy", keras.metrics.F1Score(average="macro", name="f1")],
)


def say(text):
    if tfdist.rank() == 0:  # one rank speaks for all
        print(text, flush=True)


"""
## While training

Give each rank a share of the validation data, and `MetricAverage`: the logs then have the
metrics of all validation samples, on all ranks.
"""

batch_size = GLOBAL_BATCH // tfdist.size()
history = model.fit(
    tfdist.data.shard(
        (images[TEST:], digits[TEST:]), batch_size=batch_size, shuffle=True
    ),
    validation_data=tfdist.data.shard((x, y), batch_size=batch_size),
    epochs=EPOCHS,
    callbacks=[
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ],
    verbose=2 if tfdist.rank() == 0 else 0,
    shuffle=False,
)

"""
## Why averaging results is not enough

You could let each rank evaluate its share of the data, and average the results. If a
metric is a mean over samples, this is correct only if all shares have the same size. The
shares of two ranks cannot have the same size here, because there are 797 digits: samples
in the smaller share get a larger weight. For F1, averaging is never correct, because the
mean of two F1 scores is not the F1 score of all samples.
"""

mine = slice(tfdist.rank(), None, tfdist.size())
share = model.evaluate(x[mine], y[mine], verbose=0, return_dict=True)
averaged = {name: float(tfdist.allreduce(value)) for name, value in share.items()}

"""
## evaluate

`tfdist.evaluate` receives the whole data on all ranks and distributes the batches. It
does not average results. A metric of Keras has a few sums and counts, which are added
over the ranks before the result is computed. This is exact for every metric of Keras,
including F1 and AUC, and every sample is used once.
"""

together = tfdist.evaluate(model, x, y, verbose=0, return_dict=True)

"""
One process gets the same results. For this comparison, each rank does all the work
alone; leave this out in your own program.
"""

alone = model.evaluate(x, y, verbose=0, return_dict=True)

for name in alone:
    say(
        f"{name:>8}: alone {alone[name]:.7f}, tfdist.evaluate {together[name]:.7f}, "
        f"mean of the ranks {averaged[name]:.7f}"
    )
    assert abs(together[name] - alone[name]) < 1e-6
    assert abs(history.history[f"val_{name}"][-1] - alone[name]) < 1e-6
if tfdist.size() > 1:
    assert abs(averaged["f1"] - alone["f1"]) > 1e-5

"""
## predict

`tfdist.predict` uses the same batches as one process, so the outputs are the same too,
bit for bit, in the order of the data, on all ranks. With `gather="root"` only rank 0 gets
the outputs. With `gather="none"` each rank keeps its own part.
"""

outputs = tfdist.predict(model, x, verbose=0)
assert np.array_equal(outputs, model.predict(x, verbose=0))

"""
## Numbers of your own

A sum over samples needs no metric class: count on each rank, and add up the counts. The
example counts which digit is classified as which.
"""

own, indices = tfdist.predict(model, x, gather="none", verbose=0)
truth, seen = y[indices].argmax(axis=1), own.argmax(axis=1)
taken_for = tfdist.allreduce(
    tf.math.confusion_matrix(truth, seen, num_classes=10), op=tfdist.ReduceOp.SUM
).numpy()
wrong = taken_for - np.diag(np.diag(taken_for))
digit, other = np.unravel_index(wrong.argmax(), wrong.shape)
say(f"{wrong.sum()} of {TEST} wrong; most often a {digit} is taken for a {other}")
assert taken_for.sum() == TEST
assert np.isclose(np.trace(taken_for) / TEST, together["accuracy"], atol=1e-6)

"""
A custom metric class that keeps sums needs one line, `tfdist_merge = "sum"`. It then works
in `fit` and `evaluate`, and in the comparison on this page (`docs/evaluation.md`).

## What holds now

The asserts above confirm the same metrics as in one process within 1e-6, and the same
outputs bit for bit. Accuracy is at least 0.9. The evaluation has not changed any weights:
the ranks are still bitwise equal.
"""

assert together["accuracy"] >= 0.9
bits = b"".join(weight.tobytes() for weight in model.get_weights())
hashes = tfdist.allgather_object(hashlib.sha256(bits).hexdigest()[:12])
assert len(set(hashes)) == 1, f"the ranks' weights differ: {hashes}"
say(f"same weights on {tfdist.size()} ranks: {hashes[0]}")

"""
## If you come from Horovod

| in your script | here |
|---|---|
| `MetricAverageCallback()`: the mean of the ranks' results | `MetricAverage()`: the result of all samples |
| `hvd.allreduce(score)` after `model.evaluate(share)` | `tfdist.evaluate(model, x, y)` |
| `hvd.allgather(model.predict(share))`, in the order of the ranks | `tfdist.predict(model, x)`, in the order of the data |
| validation on rank 0 only, while the others wait | a share for each rank |
"""
