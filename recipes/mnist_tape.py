"""Trains the model of mnist_fit.py in a custom training loop with the gradient tape.

    tfdistrun -np 2 python recipes/mnist_tape.py

The numbered statements are the only changes to a program for one process.
"""

import keras
import mnist_data
import tensorflow as tf
from mnist_fit import EPOCHS, GLOBAL_BATCH, SEED, build_model

import tfdist  # 1


def main() -> None:
    """Trains the model and reports the results."""
    tfdist.init()  # 2: join the other ranks
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    train = tfdist.data.shard(  # 3: this rank's share, in equal steps
        digits.train, batch_size=GLOBAL_BATCH // tfdist.size(), shuffle=True
    )
    model = build_model()
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(train))
    adam = keras.optimizers.Adam(rate)
    adam.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    tfdist.broadcast_variables(model.weights + adam.variables)  # 4: same initial state

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tfdist.DistributedGradientTape() as tape:  # 5: gradients of all ranks
            loss = loss_of(labels, model(images, training=True))
        adam.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )
        return loss

    clock = mnist_data.Clock(len(digits.train[0]))
    for epoch in range(EPOCHS):
        losses = [step(images, labels) for images, labels in train]
        loss = tfdist.allreduce(tf.reduce_mean(losses))  # 6: over all ranks
        clock.on_epoch_end(epoch)
        if tfdist.rank() == 0:  # 7: only one rank prints
            print(f"epoch {epoch + 1:2}/{EPOCHS}  loss {loss:.4f}", flush=True)
    model.compile(metrics=["accuracy"], loss=loss_of)
    mnist_data.report(model, digits.test, clock)


if __name__ == "__main__":
    main()
