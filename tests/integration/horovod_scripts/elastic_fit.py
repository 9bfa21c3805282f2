"""Digits with model.fit in an elastic job: KerasState and its three callbacks."""

import argparse

import digits
import elastic_report
import horovod.tensorflow.keras as hvd
import initial
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()
report = elastic_report.Report()

images, labels = digits.load()


class Model(tf.keras.Model):
    """Counts how often its step is traced."""

    def train_step(self, data):
        report.traced()
        return super().train_step(data)


kernel = initial.kernel(3 + hvd.rank())
inputs = tf.keras.Input((8, 8, 1))
hidden = tf.keras.layers.Flatten()(inputs)
hidden = tf.keras.layers.Dense(32, activation="relu", kernel_initializer=kernel)(hidden)
outputs = tf.keras.layers.Dense(10, kernel_initializer=kernel)(hidden)
model = Model(inputs, outputs)

# Horovod: adjust learning rate based on number of GPUs, add Distributed Optimizer.
optimizer = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()))
model.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=optimizer,
    metrics=["accuracy"],
)


def on_state_reset():
    # Horovod: adjust the learning rate to the new number of ranks.
    optimizer.learning_rate.assign(0.001 * hvd.size())
    report.reset(hvd)


class Record(tf.keras.callbacks.Callback):
    """Notes each batch."""

    def on_train_batch_end(self, batch, logs=None):
        first = state.epoch * args.steps
        report.batch(hvd, first + batch + 1)


@hvd.elastic.run
def train(state):
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.shard(hvd.size(), hvd.rank()).repeat().batch(16, drop_remainder=True)
    callbacks = [
        # Horovod: broadcast initial variable states from rank 0 to all others.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Record(),
        # Horovod: keep the state up to date, and commit it.
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
    ]
    # Horovod: the steps and epochs that are left.
    return model.fit(
        data,
        steps_per_epoch=args.steps,
        epochs=args.epochs - state.epoch,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
history = train(state)
report.write(
    hvd,
    model.get_weights(),
    loss=history.history["loss"][-1],
    epoch=state.epoch,
    iterations=int(optimizer.iterations),
    rate=float(optimizer.learning_rate.numpy()),
)
