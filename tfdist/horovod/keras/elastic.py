"""Horovod's elastic names for Keras; same as in `horovod.tensorflow.keras`."""

from tfdist.horovod.tensorflow.keras.elastic import *  # noqa: F403
from tfdist.horovod.tensorflow.keras.elastic import __all__ as __all__
