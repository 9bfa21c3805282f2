"""
Title: A training loop of your own
Author: the authors of tfdist
Date created: 2026/11/22
Last modified: 2026/11/22
Description: A GradientTape on several processes: the same start, one step, numbers of all ranks.
"""

"""
## Introduction

Without `fit` four things are yours that its callbacks do: the same start on all ranks,
gradients of all ranks, numbers of all ranks, and an end that comes on all of them in the
same step. Each is one line.

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
The data are 1,797 digits of 8x8 pixels, from a file of the package scikit-learn. All ranks
read it; `tfdist.data.shard` deals it out. `batch_size` is that of one rank.
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
would average gradients of different models. Generators of random numbers are different on
purpose: `broadcast_seed_generators` gives each rank its own masks of dropout, which follow
from the seed of rank 0.
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
the ranks. See for yourself that the average of the parts is the gradient of the whole: every
rank takes the gradient of 60 digits by itself, and then that of its share of them by the
tape. `weight` is the number of samples in the share; leave it out where all ranks have
batches of one size.
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
In the step the optimizer is a plain one: the tape reduces, or the optimizer does
(`tfdist.DistributedOptimizer`), not both. The step is a `tf.function`, so gradients leave
while the rest of the backward pass still runs; without `tf.function` it gives the same
numbers, later.
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

What a rank computes from its share is its own. `tfdist.allreduce` makes it that of all:
add up counts, and divide afterwards. A mean of the ranks' means would be wrong where their
shares differ in size, and here they do: 297 digits to two ranks.

All ranks have to leave the loop after the same step. So they decide on a number that is the
same on all of them. A rank that stopped by its own count would leave the others waiting; they
would end with an error that names it, not with a result.
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

At least 97 of 100 digits that the model has not seen; and that number is not an average
over the ranks but a count: one process, looking at all of them, finds it too.
"""

assert accuracy >= 0.97
assert int(right) == int(count(images[:TEST], digits[:TEST]))

"""
The ranks have taken the same steps: model and optimizer are equal to the last bit.
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

Batches of unequal sizes, accumulation, half types and large embeddings:
`docs/gradients.md`. A branch that only some ranks use: `recipes/examples/two_heads.py`.
"""
