"""Digits with model.fit: wrapped optimizer, broadcast, averaged metrics."""

import argparse

import digits
import horovod.tensorflow.keras as hvd
import initial
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.001)
parser.add_argument("--seed", type=int, help="default: another one on each rank")
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process).
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

seed = 7 + hvd.rank() if args.seed is None else args.seed
kernel = initial.kernel(seed)
images, labels = digits.load()
dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .shard(hvd.size(), hvd.rank())
    .repeat()
    .batch(args.batch_size)
)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu", kernel_initializer=kernel),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu", kernel_initializer=kernel),
        tf.keras.layers.Dense(10, activation="softmax", kernel_initializer=kernel),
    ]
)

# Horovod: adjust learning rate based on number of processes.
opt = tf.optimizers.Adam(args.base_lr * hvd.size())

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(
    opt, backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
)

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
]
# Horovod: save checkpoints only on worker 0.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"))

history = model.fit(
    dataset,
    # Horovod: adjust number of steps based on number of processes.
    steps_per_epoch=len(images) // args.batch_size // hvd.size(),
    callbacks=callbacks,
    epochs=2,
    verbose=1 if hvd.rank() == 0 else 0,
)
report.write(
    hvd,
    model.get_weights(),
    loss=history.history["loss"],
    accuracy=history.history["accuracy"],
)
