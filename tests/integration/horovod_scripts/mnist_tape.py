"""Digits in a loop of its own: wrapped tape, broadcast after the first step."""

import argparse

import digits
import horovod.tensorflow as hvd
import initial
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.001)
parser.add_argument("--batches", type=int, default=24)
args = parser.parse_args()

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

kernel = initial.kernel(3)
images, labels = digits.load()
dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .shard(hvd.size(), hvd.rank())
    .repeat()
    .batch(args.batch_size)
)
mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu", kernel_initializer=kernel),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu", kernel_initializer=kernel),
        tf.keras.layers.Dense(10, activation="softmax", kernel_initializer=kernel),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()

# Horovod: adjust learning rate based on number of processes.
opt = tf.optimizers.Adam(args.base_lr * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))

    # Horovod: broadcast initial variable states from rank 0 to all other processes,
    # after the first gradient step to ensure optimizer initialization.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(args.batches // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(float(loss_value))
    if batch % 5 == 0 and hvd.local_rank() == 0:
        print("Step #%d\tLoss: %.6f" % (batch, loss_value))

# Horovod: save checkpoints only on worker 0 to prevent others from corrupting them.
if hvd.rank() == 0:
    checkpoint.save("checkpoints/mnist")
report.write(hvd, [v.numpy() for v in mnist_model.trainable_variables], loss=losses)
