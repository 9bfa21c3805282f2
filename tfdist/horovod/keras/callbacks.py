"""Horovod's callbacks for `model.fit`; the same as in `horovod.tensorflow.keras`."""

from tfdist.horovod.tensorflow.keras.callbacks import *  # noqa: F403
from tfdist.horovod.tensorflow.keras.callbacks import __all__ as __all__
