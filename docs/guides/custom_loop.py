"""
Title: A training loop of your own
Author: the authors of tfdist
Date created: 2026/11/22
Last modified: 2026/11/22
Description: A GradientTape on several processes: the same start, one step, numbers of all ranks.
"""

"""
## Introduction

Without `fit`, your program has to do four things: start all ranks from the same state,
average gradients over the ranks, combine values of all ranks, and end on all ranks after
the same step. Each needs one line.

```shell
tfdistrun -np 2 python docs/guides/custom_loop.py
```

## Setup
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


def say(text):
    if tfdist.rank() == 0:  # one rank speaks for all
        print(text, flush=True)


"""
The data are 1,797 digits of 8x8 pixels, from a file of the package scikit-learn. All
ranks read them, and `tfdist.data.shard` distributes them. `batch_size` is per rank.
"""

GLOBAL_BATCH, EPOCHS, TEST = 64, 20, 297

package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
rows = np.random.default_rng(0).permutation(rows)
images = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16).astype("float32")
digits = rows[:, -1].astype("int32")

batch_size = GLOBAL_BATCH // tfdist.size()
train = tfdist.data.shard(
    (images[TEST:], digits[TEST:]), batch_size=batch_size, shuffle=True
)
test = tfdist.data.shard((images[:TEST], digits[:TEST]), batch_size=batch_size)

"""
## The same start

Build model and optimizer, then send the variables of rank 0 to all. Without this the ranks
would average gradients of different models. Random number generators differ on purpose:
`broadcast_seed_generators` gives each rank its own dropout masks, derived from the seed
of rank 0.
"""

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(10),
    ]
)
variables = model.trainable_variables
optimizer = keras.optimizers.Adam(4e-3)
optimizer.build(variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

tfdist.broadcast_variables(model.weights + optimizer.variables)
tfdist.layers.broadcast_seed_generators(model)

"""
## Gradients of all ranks

`tfdist.DistributedGradientTape` is a `tf.GradientTape` whose `gradient` is averaged over
the ranks. The following code shows that the average over the shares is the gradient of
the whole batch. Every rank first computes the gradient of all 60 digits independently,
and then the gradient of its share with the distributed tape. `weight` is the number of
samples in the share; leave it out if all ranks have batches of the same size.
"""

whole = images[:60], digits[:60]
with tf.GradientTape() as tape:
    loss = loss_of(whole[1], model(whole[0]))
expected = tape.gradient(loss, variables)

share = tuple(part[tfdist.rank() :: tfdist.size()] for part in whole)
with tfdist.DistributedGradientTape() as tape:
    loss = loss_of(share[1], model(share[0]))
averaged = tape.gradient(loss, variables, weight=len(share[1]))

furthest = max(
    float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(expected, averaged, strict=True)
)
say(f"gradients of the shares, averaged, and of the whole: {furthest:.1e} apart")
assert furthest < 1e-6

"""
The step uses a plain optimizer: either the tape reduces the gradients or the optimizer
does (`tfdist.DistributedOptimizer`), not both. The step is a `tf.function`, so gradients
are sent while the rest of the backward pass is still running. Without `tf.function`, it
gives the same results, but is slower.
"""


@tf.function
def step(images, digits):
    with tfdist.DistributedGradientTape() as tape:
        loss = loss_of(digits, model(images, training=True))
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


@tf.function
def count(images, digits):
    right = tf.argmax(model(images), axis=1, output_type=tf.int32) == digits
    return tf.reduce_sum(tf.cast(right, tf.int32))


"""
## Numbers of all ranks, and the end

Each rank computes values from its own share. `tfdist.allreduce` combines the values of
all ranks: add up counts, and divide afterwards. The mean of the ranks' means would be
wrong if their shares differ in size, as with 297 digits on two ranks.

All ranks have to leave the loop after the same step, so the decision uses a value that is
the same on all ranks. If a rank decided by its own count, the others would wait for it
and then raise an error that names it.
"""

for epoch in range(EPOCHS):
    losses = [step(*batch) for batch in train]
    loss = tfdist.allreduce(tf.reduce_mean(losses))
    right = tfdist.allreduce(
        tf.add_n([count(*batch) for batch in test]), op=tfdist.ReduceOp.SUM
    )
    accuracy = int(right) / TEST
    say(f"epoch {epoch + 1:2}: loss {loss:.4f}, {int(right)} of {TEST} digits right")
    if accuracy >= 0.975:
        break

"""
## What holds now

The model classifies at least 97 of 100 unseen digits correctly. This number is a count,
not an average over the ranks: one process that evaluates all digits gets the same number.
"""

assert accuracy >= 0.97
assert int(right) == int(count(images[:TEST], digits[:TEST]))

"""
The ranks have run the same steps: model and optimizer are bitwise equal.
"""

bits = b"".join(v.numpy().tobytes() for v in model.weights + optimizer.variables)
hashes = tfdist.allgather_object(hashlib.sha256(bits).hexdigest()[:12])
assert len(set(hashes)) == 1, f"the ranks' weights differ: {hashes}"
say(f"same weights on {tfdist.size()} ranks: {hashes[0]}")

"""
## If you come from Horovod

| in your script | here |
|---|---|
| `tape = hvd.DistributedGradientTape(tape)` | the same, or `with tfdist.DistributedGradientTape() as tape` |
| `if first_batch: hvd.broadcast_variables(...)` after the first step | `tfdist.broadcast_variables(...)` before it; build the optimizer first |
| `hvd.allreduce(tensor)` | `tfdist.allreduce(tensor)`: the average, unless `op=` says otherwise |
| a loop of `steps // hvd.size()` | `for batch in train`: equal numbers of steps, all samples used |
| ranks with different numbers of steps hang | an error that names the rank, or `tfdist.join()` (`docs/uneven-data.md`) |

## Where to go on

`docs/gradients.md` covers batches of different sizes, accumulation, half types and large
embeddings. `recipes/examples/two_heads.py` has a branch that only some ranks use.
"""
