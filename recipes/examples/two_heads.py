"""Trains two heads on one trunk; each rank's data has labels for only one head.

    tfdistrun -np 2 python recipes/examples/two_heads.py

Even ranks know which digit an image shows; odd ranks only know whether the digit is
even. On each rank, the gradients of the unused head are None and are treated as zeros
in the average. So all ranks learn both heads: the step equals that of one process with
the mean of the ranks' losses.
"""

import argparse
import sys
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers

import tfdist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist_data

HEADS = {"digit": 10, "parity": 2}  # name and number of classes
GLOBAL_BATCH, SEED = 64, 1


def build_model() -> keras.Model:
    """Builds a trunk and the heads, which return logits."""
    images = keras.Input((28, 28, 1))
    x = layers.Flatten()(images)
    x = layers.Dense(128, activation="relu")(x)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(
        images, {name: layers.Dense(n, name=name)(x) for name, n in HEADS.items()}
    )


def build_optimizer() -> keras.optimizers.Optimizer:
    """Returns the optimizer for one process; it does not reduce gradients yet."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def head_of(rank: int) -> str:
    """Returns the head for which this rank has labels."""
    return list(HEADS)[rank % len(HEADS)]


def loss_of(
    model: keras.Model, head: str, images: tf.Tensor, digits: tf.Tensor
) -> tf.Tensor:
    """Returns the mean cross entropy of one head; the other head is not used."""
    labels = digits if head == "digit" else digits % 2
    logits = model(images, training=True)[head]
    return tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    )


def main() -> None:
    """Trains the model and reports the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--save", metavar="FILE", help="where to save the model, e.g. heads.keras"
    )
    flags = parser.parse_args()
    tfdist.init()
    keras.utils.set_random_seed(SEED)
    data = mnist_data.load()
    train = tfdist.data.shard(data.train, batch_size=GLOBAL_BATCH // tfdist.size())
    head = head_of(tfdist.rank())
    model = build_model()
    optimizer = tfdist.DistributedOptimizer(build_optimizer())
    optimizer.build(model.trainable_variables)
    tfdist.broadcast_variables(model.weights + optimizer.variables)

    @tf.function
    def step(images: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, head, images, digits)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    for epoch in range(flags.epochs):
        own = tf.reduce_mean([step(images, digits) for images, digits in train])
        losses = tfdist.allgather(own[tf.newaxis])  # all ranks call it, rank 0 prints
        if tfdist.rank() == 0:
            shown = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"epoch {epoch + 1}/{flags.epochs}  loss of each rank {shown}")

    images, digits = data.test
    found = {
        name: logits.argmax(1)
        for name, logits in model.predict_on_batch(images).items()
    }
    hashes = tfdist.allgather_object(mnist_data.weights_hash(model))
    if len(set(hashes)) != 1:
        raise SystemExit(f"The ranks' weights differ. Hashes by rank: {hashes}")
    if tfdist.rank() == 0:
        if flags.save:
            model.save(flags.save)
        print(f"digit accuracy {(found['digit'] == digits).mean():.3f}")
        print(f"parity accuracy {(found['parity'] == digits % 2).mean():.3f}")
        print(f"same weights on all ranks: {hashes[0]}", flush=True)


if __name__ == "__main__":
    main()
