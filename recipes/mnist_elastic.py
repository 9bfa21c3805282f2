"""Trains the model of mnist_fit.py in a loop that continues when a rank is lost.

    tfdistrun -np 2 --min-np 1 python recipes/mnist_elastic.py

While it runs, kill one of its processes (`kill -9 PID`): the other one continues at
once, and a new process joins if training is still running when it has started. The
numbered statements make the loop elastic.
"""

import os

import keras
import mnist_data
import tensorflow as tf
from mnist_fit import EPOCHS, GLOBAL_BATCH, SEED, build_model

import tfdist


def main() -> None:
    """Trains the model and reports the results."""
    tfdist.init()
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    images, labels = digits.train
    steps_per_epoch = len(images) // GLOBAL_BATCH
    model = build_model()
    steps = EPOCHS * steps_per_epoch
    adam = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps))
    adam.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function(  # traced once for batches of any size
        input_signature=[
            tf.TensorSpec([None, 28, 28, 1], tf.float32),
            tf.TensorSpec([None], tf.int32),
        ]
    )
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tfdist.DistributedGradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        variables = model.trainable_variables
        # The ranks' parts of a batch differ by one sample if they cannot be equal.
        count = tf.shape(images)[0]
        adam.apply(tape.gradient(loss, variables, weight=count), variables)
        return loss

    print(f"process {os.getpid()}", flush=True)
    clock = mnist_data.Clock(len(images))
    state = tfdist.elastic.State(model, adam)  # 1: all that a step changes
    for step in state.steps(steps):  # 2: repeats a step that was undone
        rows = tfdist.data.samples_of_step(  # 3: the part of the current ranks
            len(images), global_batch=GLOBAL_BATCH, seed=SEED, step=step
        )
        loss = train_step(images[rows], labels[rows])
        if not state.commit():  # 4: from here on, the step is not undone
            continue
        if (step + 1) % steps_per_epoch == 0:
            epoch = step // steps_per_epoch
            clock.on_epoch_end(epoch)
            if tfdist.rank() == 0:
                ranks = "1 rank" if tfdist.size() == 1 else f"{tfdist.size()} ranks"
                text = f"epoch {epoch + 1:2}/{EPOCHS}  loss {loss:.4f} (local)  {ranks}"
                print(text, flush=True)
    model.compile(metrics=["accuracy"], loss=loss_of)
    mnist_data.report(model, digits.test, clock)


if __name__ == "__main__":
    main()
