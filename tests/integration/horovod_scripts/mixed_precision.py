"""Mixed precision in a loop of its own: loss scale, gradients in fp16 on the way."""

import argparse

import digits
import horovod.tensorflow as hvd
import initial
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--batches", type=int, default=40)
args = parser.parse_args()

hvd.init()
tf.keras.mixed_precision.set_global_policy("mixed_float16")

images, labels = digits.load()
part = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((images[part], labels[part]))
dataset = dataset.repeat().batch(args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, dtype="float32"),
    ]
)
initial.set_weights(model, 6)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.keras.optimizers.SGD(args.base_lr * hvd.size(), momentum=0.9)
opt = tf.keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=256.0)


@tf.function
def train_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
        scaled_loss = opt.get_scaled_loss(loss)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = opt.get_unscaled_gradients(scaled_gradients)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss


losses = []
for batch, (x, y) in enumerate(dataset.take(args.batches // hvd.size())):
    losses.append(float(hvd.allreduce(train_step(x, y, batch == 0), name="loss")))
if hvd.rank() == 0:
    print("loss", losses[0], "->", losses[-1])
report.write(hvd, model.get_weights(), loss=losses)
