"""The network: a plain Keras model, which knows nothing of ranks."""

import keras
from keras import layers


def build(
    input_shape: tuple[int, ...], classes: int, width: int, dropout: float
) -> keras.Model:
    """Two convolutions, and scores for the classes.

    Args:
        input_shape: of one sample, [height, width, channels].
        classes: number of classes.
        width: channels of the first convolution; the second has twice as many.
        dropout: part of the features that is left out in each step, 0..1.
    """
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(classes),
        ]
    )
