"""
Title: A GAN on several processes
Author: the authors of tfdist
Date created: 2026/11/22
Last modified: 2026/11/22
Description: Two networks, two optimizers and one train_step, trained by fit on several ranks.
"""

"""
## Introduction

A GAN trains two networks against each other: a *generator* draws, a *discriminator* tells
drawings from real images. Two things are new on several ranks. There are two optimizers,
and both have to average gradients. The noise must *not* be the same on all ranks.

```shell
tfdistrun -np 2 python docs/guides/gan.py
```

## Setup

The data are 1,797 digits of 8x8 pixels, from a file of the package scikit-learn.
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

GLOBAL_BATCH, EPOCHS, NOISE = 64, 30, 16

package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
images = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16).astype("float32")


def say(text):
    if tfdist.rank() == 0:  # one rank speaks for all
        print(text, flush=True)


"""
## Two networks

The networks are the same as in one process.
"""


def make_generator():
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(96),
            layers.LeakyReLU(0.2),
            layers.Dense(64, activation="sigmoid"),
            layers.Reshape((8, 8, 1)),
        ]
    )


def make_discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(96),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


"""
## One model

`compile` wraps each of the two optimizers, with a different name. Each optimizer reduces
only the gradients that it receives. The two reductions of a step have the same order on
all ranks, because all ranks run the same `train_step`.

`fit` does not use these optimizers, but `BroadcastInitialState` finds them: it looks for
wrapped optimizers among the attributes of the model. An attribute that is an optimizer
but is not wrapped raises an error.

The noise comes from a random number generator with the seed `tfdist.data.seed(1)`, which
is different on each rank. With the same seed on all ranks, the ranks would draw the same
images and repeat the same work.
"""


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = make_generator()
        self.discriminator = make_discriminator()
        self.noise = keras.random.SeedGenerator(tfdist.data.seed(1))
        self.is_real = keras.losses.BinaryCrossentropy(from_logits=True)
        self.telling_loss = keras.metrics.Mean("telling")
        self.drawing_loss = keras.metrics.Mean("drawing")

    def compile(self, drawing, telling):
        super().compile(optimizer=None, jit_compile=False)
        self.drawing = tfdist.DistributedOptimizer(drawing, name="drawing")
        self.telling = tfdist.DistributedOptimizer(telling, name="telling")

    def draw(self, count, training=False):
        noise = keras.random.normal((count, NOISE), seed=self.noise)
        return self.generator(noise, training=training)

    def train_step(self, real):
        count = tf.shape(real)[0]
        both = tf.concat([real, self.draw(count, training=True)], axis=0)
        truth = tf.concat([tf.fill((count, 1), 0.9), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            loss = self.is_real(truth, self.discriminator(both, training=True))
        variables = self.discriminator.trainable_variables
        self.telling.apply(tape.gradient(loss, variables), variables)
        self.telling_loss.update_state(loss, sample_weight=count)

        with tf.GradientTape() as tape:
            seen = self.discriminator(self.draw(count, training=True), training=True)
            loss = self.is_real(tf.ones((count, 1)), seen)
        variables = self.generator.trainable_variables
        self.drawing.apply(tape.gradient(loss, variables), variables)
        self.drawing_loss.update_state(loss, sample_weight=count)
        shown = (self.telling_loss, self.drawing_loss)
        return {metric.name: metric.result() for metric in shown}


"""
## Training

The drawings are compared with the digits by two images: the mean of each pixel and its
spread. A distance of 0 is a perfect match; 1 is the distance of a black image.
"""


def unlikeness(drawn):
    pairs = [(f(drawn, axis=0), f(images, axis=0)) for f in (np.mean, np.std)]
    off = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(off / sum(np.sum(b**2) for _, b in pairs)))


model = Gan()
model.compile(
    drawing=keras.optimizers.Adam(2e-3, beta_1=0.5),
    telling=keras.optimizers.Adam(1e-3, beta_1=0.5),
)
before = unlikeness(model.draw(500).numpy())
model.fit(
    tfdist.data.shard(images, batch_size=GLOBAL_BATCH // tfdist.size(), shuffle=True),
    epochs=EPOCHS,
    callbacks=[
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ],
    verbose=2 if tfdist.rank() == 0 else 0,
    shuffle=False,
)

"""
## What holds now

The generator has learned what digits have in common.
"""

drawn = model.draw(500).numpy()
after = unlikeness(drawn)
say(f"unlike real digits: {before:.2f} before, {after:.2f} after {EPOCHS} epochs")
assert after < before / 2
assert after < 0.4

"""
Both networks are bitwise equal on all ranks, although no two ranks have used the same
drawing.
"""


def hash_of(*arrays):
    bits = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(bits).hexdigest()[:12]


networks = model.generator.get_weights() + model.discriminator.get_weights()
hashes = tfdist.allgather_object(hash_of(*networks))
assert len(set(hashes)) == 1, f"the ranks' weights differ: {hashes}"
drawings = tfdist.allgather_object(hash_of(drawn))
assert len(set(drawings)) == tfdist.size(), f"ranks drew the same: {drawings}"
say(f"same weights on {tfdist.size()} ranks: {hashes[0]}")

"""
## In a loop of your own

Use two `tfdist.DistributedGradientTape`, one for each loss, with plain optimizers. Call
`tfdist.broadcast_variables` for both networks and both optimizers before the first step
(`custom_loop.py`). A penalty on gradients needs a third, inner tape. This tape stays a
`tf.GradientTape`, because the penalty uses only the rank's own images.

## If you come from Horovod

`hvd.DistributedOptimizer` around each of the two, and
`BroadcastGlobalVariablesCallback(0)`, become the two lines above. Unlike in Horovod,
layers draw a different stream of random numbers on each rank, as one process with the
larger batch would. Only noise that you draw yourself, as above, needs `tfdist.data.seed`.

The same on 28x28 digits: `recipes/examples/gan.py`.
"""
