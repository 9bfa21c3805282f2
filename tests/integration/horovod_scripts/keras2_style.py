"""A script of 2020: lr=, optimizer.lr, run_tf_function, variables(), .h5."""

import argparse

import digits
import horovod.tensorflow.keras as hvd
import initial
import report
import tensorflow as tf
from tensorflow import keras

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()

hvd.init()
tf.random.set_seed(13)
images, labels = digits.load()
part = slice(hvd.rank(), None, hvd.size())
images, labels = images[part], keras.utils.to_categorical(labels[part], 10)

model = keras.models.Sequential()
model.add(keras.layers.Conv2D(8, (3, 3), activation="relu", input_shape=(8, 8, 1)))
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10, activation="softmax"))
initial.set_weights(model, 13)

opt = keras.optimizers.SGD(lr=args.lr * hvd.size(), momentum=0.9)
opt = hvd.DistributedOptimizer(opt)
model.compile(
    loss="categorical_crossentropy",
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
rates = [float(keras.backend.get_value(model.optimizer.lr))]


class Decay(keras.callbacks.Callback):
    """Halves the rate after the first epoch, as one wrote it then."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.lr = float(self.model.optimizer.lr) / 2
        rates.append(float(keras.backend.get_value(self.model.optimizer.lr)))


callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    Decay(),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
history = model.fit(
    images,
    labels,
    batch_size=args.batch_size,
    shuffle=False,
    epochs=2,
    callbacks=callbacks,
    verbose=1 if hvd.rank() == 0 else 0,
)
slots = len(opt.variables())
loss = history.history["loss"]
report.write(hvd, model.get_weights(), loss=loss, rates=rates, slots=slots)
