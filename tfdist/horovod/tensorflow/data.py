"""Horovod's tf.data compute service, which tfdist does not support.

Raises:
    ImportError: always; the message names alternatives.
"""

raise ImportError(
    "horovod.tensorflow.data needs Horovod's own runner, which tfdist replaces. If a "
    "few ranks should read and prepare data for all ranks, write dataset = "
    "tfdist.data.scatter(dataset, ...); or start TensorFlow's own "
    "tf.data.experimental.service and pass its address to "
    "tf.data.experimental.service.distribute(...)."
)
