"""The network: a plain Keras model that does not depend on tfdist."""

import keras
from keras import layers


def build(
    input_shape: tuple[int, ...], classes: int, width: int, dropout: float
) -> keras.Model:
    """Builds two convolutions, followed by the scores of the classes.

    Args:
        input_shape: shape of one sample, [height, width, channels].
        classes: number of classes.
        width: channels of the first convolution; the second has twice as many.
        dropout: fraction of the features that is dropped in each step, 0..1.
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
