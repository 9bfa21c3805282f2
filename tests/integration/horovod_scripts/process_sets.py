"""Process sets: gradients over one set, statistics of the data over another."""

import argparse

import digits
import horovod.tensorflow as hvd
import numpy as np
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

first = hvd.ProcessSet([0])
hvd.init(process_sets="dynamic")
trainers = hvd.add_process_set(range(hvd.size())) if hvd.size() > 1 else None
trainers = trainers or hvd.global_process_set
first = hvd.add_process_set(first) if hvd.size() > 1 else hvd.global_process_set

images, labels = digits.load()
# The first rank alone looks at the data; all are told.
mean = np.zeros((), np.float32)
if first.included():
    mean = hvd.allreduce(
        tf.constant(images.mean()), name="mean", process_set=first, op=hvd.Sum
    ).numpy()
mean = hvd.broadcast(tf.constant(mean), root_rank=0, name="mean.all").numpy()
part = slice(trainers.rank(), None, trainers.size())
images, labels = images[part] - mean, labels[part]

tf.keras.utils.set_random_seed(4 + hvd.rank())
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.keras.optimizers.SGD(args.lr)
hvd.broadcast_variables(model.variables, root_rank=0, process_set=trainers)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape, process_set=trainers)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


for number in range(12):
    batch = slice(number * args.batch_size, (number + 1) * args.batch_size)
    step(tf.constant(images[batch]), tf.constant(labels[batch]))
sizes = [first.size(), trainers.size()]
if hvd.size() > 1:
    hvd.remove_process_set(trainers)
report.write(hvd, model.get_weights(), mean=float(mean), sizes=sizes)
