"""Gradients of four batches are added up on each rank, and reduced once."""

import argparse

import digits
import horovod.tensorflow.keras as hvd
import initial
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--batches-per-allreduce", type=int, default=4)
parser.add_argument("--seed", type=int, help="default: another one on each rank")
args = parser.parse_args()

hvd.init()
images, labels = digits.load()
part = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((images[part], labels[part]))
dataset = dataset.batch(args.batch_size).take(32 // hvd.size())

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="tanh"),
        tf.keras.layers.Dense(10),
    ]
)
initial.set_weights(model, 2 + hvd.rank() if args.seed is None else args.seed)
opt = tf.keras.optimizers.SGD(args.base_lr, momentum=0.9)
opt = hvd.DistributedOptimizer(
    opt,
    backward_passes_per_step=args.batches_per_allreduce,
    average_aggregated_gradients=True,
)
model.compile(
    optimizer=opt,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
history = model.fit(
    dataset,
    epochs=2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)
report.write(hvd, model.get_weights(), loss=history.history["loss"])
