"""What recipes/mnist_fit.py is without tfdist: the same program for one process."""

import keras
import mnist_data
import tensorflow as tf
from keras import layers

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
    keras.utils.set_random_seed(SEED)
    digits = mnist_data.load()
    train = (
        tf.data.Dataset.from_tensor_slices(digits.train)
        .shuffle(len(digits.train[0]), seed=SEED)
        .batch(GLOBAL_BATCH)
    )
    model = build_model()
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(train))
    model.compile(
        keras.optimizers.Adam(rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    clock = mnist_data.Clock(len(digits.train[0]))
    model.fit(train, epochs=EPOCHS, callbacks=[clock], shuffle=False)
    mnist_data.report(model, digits.test, clock)


if __name__ == "__main__":
    main()
