"""
Title: Training with fit on several processes
Author: the authors of tfdist
Date created: 2026/11/22
Last modified: 2026/11/22
Description: A model that fit trains on two processes, from the first line to the saved file.
"""

"""
## Introduction

In data-parallel training each process, a *rank*, has a copy of the model and trains it on
its own part of the data. After every backward pass the gradients of all ranks are
averaged, and each rank takes the same step. Two ranks with 32 samples each take the step
of one process with 64.

This file is the whole program. Start it on two ranks with

```shell
tfdistrun -np 2 python docs/guides/fit.py
```

or on one rank with `python docs/guides/fit.py`. The program is the same.

## Setup

`tfdist.init()` comes first. It finds the other ranks and connects to them; from then on
`tfdist.rank()` is the index of this process, from 0, and `tfdist.size()` the number of
processes. On a machine with GPUs, call `tfdist.pin_gpu()` next: one GPU for each rank.
"""

import hashlib
import importlib.util
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

import tfdist

tfdist.init()
keras.utils.set_random_seed(1)


def say(text):
    if tfdist.rank() == 0:  # one rank speaks for all
        print(text, flush=True)


"""
## The data

The data are 1,797 handwritten digits of 8x8 pixels, from a file of the package
scikit-learn. Every rank reads all of them, in the same order.
"""

GLOBAL_BATCH, EPOCHS, TEST = 64, 15, 297

package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
rows = np.random.default_rng(0).permutation(rows)
images = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16).astype("float32")
digits = rows[:, -1].astype("int32")

"""
`tfdist.data.shard` gives each rank its share. Every sample belongs to one rank, all ranks
run the same number of steps, and samples are shuffled again in each epoch. `batch_size`
is the batch size per rank. This program keeps the *global* batch fixed, so any number of
ranks that divides 64 gives the same training, with the same learning rate. 3 ranks use 21
samples each, a global batch of 63. If you keep the batch size per rank instead, the
global batch grows with the number of ranks, and the learning rate should grow too: see
`docs/large-batches.md`.
"""

batch_size = GLOBAL_BATCH // tfdist.size()
train = tfdist.data.shard(
    (images[TEST:], digits[TEST:]), batch_size=batch_size, shuffle=True
)
test = tfdist.data.shard((images[:TEST], digits[:TEST]), batch_size=batch_size)

"""
## The model

The model does not depend on the number of ranks.
"""

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)

"""
`tfdist.DistributedOptimizer` accepts any optimizer of Keras and returns the same object.
It then averages gradients over the ranks before it clips, decays or applies them. They
are sent while the rest of the backward pass is still running.
"""

rate = keras.optimizers.schedules.CosineDecay(6e-3, EPOCHS * len(train))
model.compile(
    optimizer=tfdist.DistributedOptimizer(keras.optimizers.Adam(rate)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

"""
## Training

Training needs two callbacks, in this order:

- `BroadcastInitialState` gives all ranks the state of rank 0 before the first step, and
  gives each rank its own stream of dropout masks;
- `MetricAverage` puts metrics computed over the samples of all ranks into the logs.
  Callbacks that read the logs (`EarlyStopping`, `Checkpoint`) come after it, so that they
  make the same decisions on all ranks.

A list that would let the ranks diverge raises an error before the first step
(`docs/callbacks.md`). Use `shuffle=False`, because the dataset already shuffles.
"""

history = model.fit(
    train,
    validation_data=test,
    epochs=EPOCHS,
    callbacks=[
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ],
    verbose=2 if tfdist.rank() == 0 else 0,
    shuffle=False,
)

"""
## Saving

The optimizer keeps its name and its state, so the file contains a plain Keras model that
can be loaded without tfdist. One rank writes it. During `fit`, use
`tfdist.callbacks.Checkpoint`; `tfdist.restore` then continues at the exact step.
"""

if tfdist.rank() == 0:
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "digits.keras"))
        loaded = keras.models.load_model(Path(folder, "digits.keras"))
    assert type(loaded.optimizer) is keras.optimizers.Adam
    for mine, saved in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert np.array_equal(mine, saved)

"""
## What holds now

The model classifies at least 96 of 100 unseen digits correctly. The validation in `fit`
used each of them once, so `tfdist.evaluate` returns the same number.
"""

results = tfdist.evaluate(
    model, images[:TEST], digits[:TEST], return_dict=True, verbose=0
)
say(f"accuracy {results['accuracy']:.4f} on {TEST} digits not trained on")
assert results["accuracy"] >= 0.96
assert np.isclose(results["accuracy"], history.history["val_accuracy"][-1], atol=1e-6)

"""
The ranks have bitwise equal weights. If a rank had missed one average, or had rounded it
differently, this check would fail.
"""

bits = b"".join(weight.tobytes() for weight in model.get_weights())
hashes = tfdist.allgather_object(hashlib.sha256(bits).hexdigest()[:12])
assert len(set(hashes)) == 1, f"the ranks' weights differ: {hashes}"
say(f"same weights on {tfdist.size()} ranks: {hashes[0]}")

"""
## If you come from Horovod

A Horovod script runs without changes with `tfdistrun --horovod`. With tfdist's own names:

| in your script | here |
|---|---|
| `dataset.shard(hvd.size(), hvd.rank())` | `tfdist.data.shard(data, batch_size=...)`: equal steps for all |
| `hvd.DistributedOptimizer(opt)` | `tfdist.DistributedOptimizer(opt)` |
| `BroadcastGlobalVariablesCallback(0)` | `BroadcastInitialState()`: before the first step, not after it |
| `MetricAverageCallback()` | `MetricAverage()`: of all samples, not the mean of the ranks' means |
| `if hvd.rank() == 0: callbacks.append(ModelCheckpoint(...))` | `Checkpoint(...)` on all ranks |

## Where to go on

`custom_loop.py` in this folder does the same without `fit`. `evaluation.py` shows how to
get exact metrics. `docs/models-and-loops.md` lists each way of training.
"""
