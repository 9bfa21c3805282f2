"""Process sets: even and odd ranks train a model each, on halves of the data."""

import argparse

import digits
import horovod.tensorflow as hvd
import initial
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

# Horovod: the number of processes is needed to define the sets.
hvd.init(process_sets="dynamic")
even_set = hvd.add_process_set(hvd.ProcessSet(range(0, hvd.size(), 2)))
odd_set = hvd.add_process_set(hvd.ProcessSet(range(1, hvd.size(), 2)))
for ps in [hvd.global_process_set, even_set, odd_set]:
    print(ps)
which = 0 if even_set.included() else 1
own_set = [even_set, odd_set][which]

images, labels = digits.load()
images, labels = images[which::2], labels[which::2]
part = slice(own_set.rank(), None, own_set.size())
images, labels = images[part], labels[part]

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
initial.set_weights(model, 4 + hvd.rank())
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.keras.optimizers.SGD(args.lr)
# Horovod: root_rank is a global rank, also with a process set.
hvd.broadcast_variables(model.variables, root_rank=which, process_set=own_set)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape, process_set=own_set)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


curve = []
for number in range(12):
    batch = slice(number * args.batch_size, (number + 1) * args.batch_size)
    loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
    curve.append(float(loss))
own_loss = hvd.allreduce(loss, name="loss", process_set=own_set)
losses = hvd.allgather(tf.reshape(own_loss, [1]), name="losses")

# Both models, on all ranks.
ensemble = [
    hvd.broadcast(weight, root_rank=root, name=f"model{root}.{i}").numpy()
    for root in (0, 1)
    for i, weight in enumerate(model.get_weights())
]
sizes = [even_set.size(), odd_set.size()]
hvd.remove_process_set(odd_set)
losses = [float(loss) for loss in losses]
report.write(hvd, ensemble, sizes=sizes, loss=curve, losses=losses)
