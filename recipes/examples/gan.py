"""Trains a GAN to draw digits: two models, two optimizers, one train_step, model.fit.

    tfdistrun -np 2 python recipes/examples/gan.py

Each optimizer reduces its own gradients. All ranks have the same weights, but each rank
has its own digits and noise.

References:
    Goodfellow et al., Generative Adversarial Nets, NIPS 2014, algorithm 1.
    Radford, Metz & Chintala, Unsupervised Representation Learning with Deep
    Convolutional Generative Adversarial Networks, ICLR 2016, section 4: beta_1 of Adam
    and the slope of LeakyReLU (arXiv:1511.06434).
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist_data

GLOBAL_BATCH, NOISE, SEED = 100, 32, 1


class Gan(keras.Model):
    """Draws digits (`generator`) and tells them from real ones (`discriminator`)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(128),
                layers.LeakyReLU(0.2),
                layers.Dense(28 * 28, activation="sigmoid"),
                layers.Reshape((28, 28, 1)),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Flatten(),
                layers.Dense(128),
                layers.LeakyReLU(0.2),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        self.noise_seed = keras.random.SeedGenerator(tfdist.data.seed(SEED))
        self.is_real = keras.losses.BinaryCrossentropy(from_logits=True)
        self.losses_seen = [keras.metrics.Mean(n) for n in ("telling", "drawing")]

    def compile(self, for_drawing: float, for_telling: float) -> None:
        """Creates an optimizer for each model; both reduce over the ranks."""
        super().compile(optimizer=None, jit_compile=False)
        self.drawing = tfdist.DistributedOptimizer(
            keras.optimizers.Adam(for_drawing, beta_1=0.5), name="drawing"
        )
        self.telling = tfdist.DistributedOptimizer(
            keras.optimizers.Adam(for_telling, beta_1=0.5), name="telling"
        )

    def draw(self, count: int, training: bool = False) -> tf.Tensor:
        """Draws `count` new digits of shape [count, 28, 28, 1]."""
        noise = keras.random.normal((count, NOISE), seed=self.noise_seed)
        return self.generator(noise, training=training)

    def train_step(self, real: tf.Tensor) -> dict[str, tf.Tensor]:
        """Takes a step of the discriminator, then a step of the generator."""
        count = tf.shape(real)[0]
        drawn = self.draw(count, training=True)
        with tf.GradientTape() as tape:
            seen = self.discriminator(tf.concat([real, drawn], 0), training=True)
            truth = tf.concat([0.9 * tf.ones((count, 1)), tf.zeros((count, 1))], 0)
            telling_loss = self.is_real(truth, seen)
        variables = self.discriminator.trainable_variables
        self.telling.apply(tape.gradient(telling_loss, variables), variables)

        with tf.GradientTape() as tape:
            seen = self.discriminator(self.draw(count, training=True), training=True)
            drawing_loss = self.is_real(tf.ones((count, 1)), seen)
        variables = self.generator.trainable_variables
        self.drawing.apply(tape.gradient(drawing_loss, variables), variables)
        for metric, loss in zip(
            self.losses_seen, [telling_loss, drawing_loss], strict=True
        ):
            metric.update_state(loss, sample_weight=count)
        return {metric.name: metric.result() for metric in self.losses_seen}


def unlikeness(drawn: np.ndarray, real: np.ndarray) -> float:
    """Returns how far the pixels' mean and spread are from those of real digits.

    0 means no difference; 1 means the difference of a black image.
    """
    pairs = [(f(drawn, axis=0), f(real, axis=0)) for f in (np.mean, np.std)]
    return float(
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
        / np.sqrt(sum(np.sum(b**2) for _, b in pairs))
    )


def main() -> None:
    """Trains the GAN and reports the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    tfdist.init()
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    real = digits.train[0]
    model = Gan()
    model.compile(for_drawing=2e-3, for_telling=1e-3)
    before = unlikeness(model.draw(500).numpy(), digits.test[0])
    model.fit(
        tfdist.data.shard(real, batch_size=GLOBAL_BATCH // tfdist.size(), shuffle=True),
        epochs=epochs,
        callbacks=[
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.MetricAverage(),
        ],
        verbose=2 if tfdist.rank() == 0 else 0,
        shuffle=False,
    )
    after = unlikeness(model.draw(500).numpy(), digits.test[0])
    hashes = tfdist.allgather_object(mnist_data.weights_hash(model))
    if len(set(hashes)) != 1:
        raise SystemExit(f"The ranks' weights differ. Hashes by rank: {hashes}")
    if tfdist.rank() == 0:
        print(f"unlike real digits: {before:.3f} before, {after:.3f} after")
        print(f"same weights on all ranks: {hashes[0]}", flush=True)


if __name__ == "__main__":
    main()
