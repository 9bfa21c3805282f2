"""A CNN learns 4,000 real MNIST digits with model.fit, on one rank or several.

    tfdistrun -np 2 python recipes/mnist_fit.py

The numbered lines are what tfdist changes in a program for one process.
"""

import keras
import mnist_data
from keras import layers

import tfdist

EPOCHS, GLOBAL_BATCH, SEED = 12, 64, 1


def build_model() -> keras.Model:
    """Two convolutions and a softmax over the ten digits."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.4),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    """Trains the model and reports."""
    tfdist.init()  # 1: join the other ranks
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    batch = GLOBAL_BATCH // tfdist.size()
    train = tfdist.data.shard(digits.train, batch_size=batch, shuffle=True)  # 2
    model = build_model()
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(train))
    adam = tfdist.DistributedOptimizer(keras.optimizers.Adam(rate))  # 3
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    clock = mnist_data.Clock(len(digits.train[0]))
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),  # 4: the same start on all ranks,
        tfdist.callbacks.MetricAverage(),  # and metrics over all ranks
        clock,
    ]
    verbose = 1 if tfdist.rank() == 0 else 0  # 5: one progress bar
    model.fit(train, epochs=EPOCHS, verbose=verbose, callbacks=callbacks, shuffle=False)
    mnist_data.report(model, digits.test, clock)


if __name__ == "__main__":
    main()
