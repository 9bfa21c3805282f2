"""Trains a CNN on 4,000 real MNIST digits with model.fit, on one or more ranks.

    tfdistrun -np 2 python recipes/mnist_fit.py

The numbered statements are the only changes to a program for one process.
"""

import keras
import mnist_data
from keras import layers

import tfdist  # 1

EPOCHS, GLOBAL_BATCH, SEED = 12, 64, 1


def build_model() -> keras.Model:
    """Builds two convolutions and a softmax over the ten digits."""
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
    """Trains the model and reports the results."""
    tfdist.init()  # 2: join the other ranks
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    train = tfdist.data.shard(  # 3: this rank's share, in equal steps
        digits.train, batch_size=GLOBAL_BATCH // tfdist.size(), shuffle=True
    )
    model = build_model()
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(train))
    model.compile(  # 4: gradients of all ranks
        tfdist.DistributedOptimizer(keras.optimizers.Adam(rate)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    clock = mnist_data.Clock(len(digits.train[0]))
    model.fit(  # 5: same initial weights, metrics of all ranks, one progress bar
        train,
        epochs=EPOCHS,
        callbacks=[
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.MetricAverage(),
            clock,
        ],
        verbose=1 if tfdist.rank() == 0 else 0,
        shuffle=False,  # the dataset is already shuffled
    )
    mnist_data.report(model, digits.test, clock)


if __name__ == "__main__":
    main()
