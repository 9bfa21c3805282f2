"""Horovod's elastic names for Keras, in a world of fixed size; the same likewise."""

from tfdist.horovod.tensorflow.keras.elastic import *  # noqa: F403
from tfdist.horovod.tensorflow.keras.elastic import __all__ as __all__
