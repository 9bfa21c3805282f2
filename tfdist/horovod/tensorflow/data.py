"""Horovod's tf.data compute service, which is not supported.

Raises:
    ImportError: always; names what to use.
"""

raise ImportError(
    "horovod.tensorflow.data needs Horovod's own runner, which tfdist replaces. If few "
    "ranks shall read and prepare data for all, write dataset = "
    "tfdist.data.scatter(dataset, ...); or start TensorFlow's own "
    "tf.data.experimental.service and give its address to "
    "tf.data.experimental.service.distribute(...)."
)
