"""A residual network and ImageNet's schedule: warm-up, steps, resume, validation."""

import argparse
import os

import digits
import horovod.keras as hvd
import initial
import keras
import report

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.h5")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, help="default: another one on each rank")
args = parser.parse_args()

hvd.init()

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

# Horovod: broadcast resume_from_epoch from rank 0 (which will have checkpoints).
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))

# Horovod: print logs on the first worker.
verbose = 1 if hvd.rank() == 0 else 0

images, labels = digits.load(1280)
train = (images[hvd.rank() : 1024 : hvd.size()], labels[hvd.rank() : 1024 : hvd.size()])
validation = (images[1024:], labels[1024:])


def residual(x, filters):
    y = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    y = keras.layers.BatchNormalization()(y)
    y = keras.layers.Conv2D(filters, 3, padding="same")(y)
    return keras.layers.Activation("relu")(keras.layers.add([x, y]))


inputs = keras.layers.Input((8, 8, 1))
x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
x = residual(residual(x, 8), 8)
x = keras.layers.GlobalAveragePooling2D()(x)
model = keras.models.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))
initial.set_weights(model, 1 + hvd.rank() if args.seed is None else args.seed)

# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

# Restore from a previous checkpoint, on the first worker alone.
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(
        args.checkpoint_format.format(epoch=resume_from_epoch), compression=compression
    )
else:
    # Horovod: adjust learning rate based on number of GPUs.
    initial_lr = args.base_lr * hvd.size()
    # A legacy one: the callbacks set its momentum when they change its rate.
    opt = keras.optimizers.legacy.SGD(learning_rate=initial_lr, momentum=args.momentum)
    # Horovod: add Horovod Distributed Optimizer.
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(
        loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"]
    )

initial_lr = args.base_lr * hvd.size()
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: using `lr = 1.0 * hvd.size()` from the very beginning leads to worse
    # final accuracy. Scale the learning rate to it during the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=initial_lr, warmup_epochs=args.warmup_epochs, verbose=verbose
    ),
    # Horovod: after the warmup reduce learning rate by 10 on the 4th and 5th epochs.
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr,
        multiplier=1.0,
        start_epoch=args.warmup_epochs,
        end_epoch=3,
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr,
        multiplier=lambda epoch: 1e-1,
        start_epoch=3,
        end_epoch=4,
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=lambda epoch: 1e-2, start_epoch=4
    ),
]
# Horovod: save checkpoints only on the first worker.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))

history = model.fit(
    *train,
    batch_size=args.batch_size,
    shuffle=False,
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
    validation_data=validation,
)
score = hvd.allreduce(model.evaluate(*validation, verbose=0))
report.write(
    hvd,
    [v.numpy() for v in model.trainable_variables],
    lr=[float(rate) for rate in history.history["lr"]],
    loss=history.history["loss"],
    accuracy=float(score[1]),
)
