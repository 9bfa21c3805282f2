"""Evaluation over all ranks: predictions are gathered, sums reduced, objects shared."""

import argparse

import digits
import horovod.tensorflow as hvd
import initial
import numpy as np
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
config = {"units": 24, "classes": list(range(10))} if hvd.rank() == 0 else None
config = hvd.broadcast_object(config, root_rank=0)

images, labels = digits.load()
train = slice(hvd.rank(), 768, hvd.size())
# The last rank has fewer samples to look at: 255 have no equal halves.
test = slice(768 + hvd.rank(), 1023, hvd.size())

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(config["units"], activation="relu"),
        tf.keras.layers.Dense(len(config["classes"])),
    ]
)
initial.set_weights(model, 9 + hvd.rank())
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.keras.optimizers.Adam(args.lr)
hvd.broadcast_variables(model.variables, root_rank=0)

losses = []
dataset = tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
for x, y in dataset.batch(args.batch_size):  # not in a tf.function: every step is eager
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    grads = hvd.grouped_allreduce(grads, op=hvd.Average)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    losses.append(float(loss))

logits = model.predict(images[test], verbose=0)
right = int(np.sum(logits.argmax(axis=1) == labels[test]))
counts = hvd.allreduce(tf.constant([right, len(logits)]), op=hvd.Sum, name="counts")
gathered = hvd.allgather(tf.constant(logits), name="logits")
known = hvd.allgather(tf.constant(labels[test]), name="labels")
per_rank = hvd.allgather_object({"rank": hvd.rank(), "samples": len(logits)})
accuracy = float(np.mean(gathered.numpy().argmax(axis=1) == known.numpy()))
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f} on {int(counts[1])} digits")
report.write(
    hvd,
    model.get_weights(),
    loss=losses,
    accuracy=accuracy,
    counts=[int(c) for c in counts],
    gathered=int(gathered.shape[0]),
    per_rank=[entry["samples"] for entry in per_rank],
)
