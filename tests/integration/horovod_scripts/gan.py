"""A GAN: two networks, two optimizers, two tapes of Horovod in one step."""

import argparse

import digits
import horovod.tensorflow as hvd
import initial
import numpy as np
import report
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-4)
args = parser.parse_args()

hvd.init()
NOISE, STEPS = 16, 10

generator = tf.keras.Sequential(
    [
        layers.Input((NOISE,)),
        layers.Dense(64),
        layers.LeakyReLU(),
        layers.Dense(64, activation="sigmoid"),
        layers.Reshape((8, 8, 1)),
    ]
)
discriminator = tf.keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(8, 3, strides=2),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    ]
)
initial.set_weights(generator, 11 + hvd.rank())
initial.set_weights(discriminator, 12 + hvd.rank())
cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
generator_optimizer = tf.keras.optimizers.Adam(args.lr, beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(args.lr, beta_1=0.5)

# Horovod: broadcast the weights before training starts.
hvd.broadcast_variables(generator.variables, root_rank=0)
hvd.broadcast_variables(discriminator.variables, root_rank=0)


@tf.function
def train_step(images, noise):
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        fakes = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(fakes, training=True)
        gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
        disc_loss = cross_entropy(
            tf.ones_like(real_output), real_output
        ) + cross_entropy(tf.zeros_like(fake_output), fake_output)
    gen_tape = hvd.DistributedGradientTape(gen_tape)
    disc_tape = hvd.DistributedGradientTape(disc_tape)
    gen_grads = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_grads = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_grads, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(
        zip(disc_grads, discriminator.trainable_variables)
    )
    return gen_loss, disc_loss


images, _ = digits.load()
images = images[hvd.rank() :: hvd.size()]
noise = np.random.default_rng(0).normal(size=(1024, NOISE)).astype(np.float32)
noise = noise[hvd.rank() :: hvd.size()]
losses = []
for step in range(STEPS):
    part = slice(step * args.batch_size, (step + 1) * args.batch_size)
    gen_loss, disc_loss = train_step(
        tf.constant(images[part]), tf.constant(noise[part])
    )
    losses += [float(gen_loss), float(disc_loss)]
    if step % 5 == 0 and hvd.rank() == 0:
        print(f"step {step}: {float(gen_loss):.4f} {float(disc_loss):.4f}")
report.write(
    hvd,
    [v.numpy() for v in [*generator.variables, *discriminator.variables]],
    loss=losses,
)
