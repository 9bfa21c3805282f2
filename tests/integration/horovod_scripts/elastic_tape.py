"""Digits in an elastic loop of its own: wrapped tape, a commit every ten batches."""

import argparse

import digits
import elastic_report
import horovod.tensorflow as hvd
import initial
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=400)
parser.add_argument("--batches-per-commit", type=int, default=10)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()
report = elastic_report.Report()

images, labels = digits.load()
model = tf.keras.Sequential(
    [
        tf.keras.Input((8, 8, 1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(
            32, activation="relu", kernel_initializer=initial.kernel(3 + hvd.rank())
        ),
        tf.keras.layers.Dense(10, kernel_initializer=initial.kernel(3 + hvd.rank())),
    ]
)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Horovod: adjust learning rate based on number of GPUs.
optimizer = tf.optimizers.Adam(0.001 * hvd.size())


@tf.function
def train_one_batch(data, target, allreduce=True):
    report.traced()
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss_value = loss(target, probs)

    # Horovod: add Horovod Distributed GradientTape.
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss_value


def dataset():
    """This rank's batches; other ranks after the next reset."""
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.shard(hvd.size(), hvd.rank()).repeat()
    return data.batch(16, drop_remainder=True)


# Horovod: initialize model and optimizer state so we can synchronize across workers.
for data, target in dataset().take(1):
    train_one_batch(data, target, allreduce=False)


@hvd.elastic.run
def train(state):
    batches_per_epoch = args.batches // 2
    while state.epoch < 2:
        left = batches_per_epoch - state.batch
        for data, target in dataset().skip(state.batch).take(left):
            loss_value = train_one_batch(data, target)
            state.batch += 1
            report.batch(hvd, state.epoch * batches_per_epoch + state.batch)
            if state.batch % args.batches_per_commit == 0:
                if state.batch % 100 == 0 and hvd.rank() == 0:
                    print(f"epoch {state.epoch} batch {state.batch}: {loss_value:.3f}")
                # Horovod: commit state every few batches.
                state.commit()
        state.batch, state.epoch = 0, state.epoch + 1
    return float(loss_value)


def on_state_reset():
    optimizer.learning_rate.assign(0.001 * hvd.size())
    report.reset(hvd)


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
last = train(state)
report.write(
    hvd,
    model.get_weights(),
    loss=last,
    epoch=state.epoch,
    iterations=int(optimizer.iterations),
    rate=float(optimizer.learning_rate.numpy()),
)
