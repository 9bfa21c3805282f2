"""Mistakes by which every rank would train on its own; each must be an error."""

import digits
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import tensorflow as tf

images, labels = digits.load(128)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_with(optimizer, *layers):
    tf.keras.utils.set_random_seed(1)  # or ranks that differ would be found before
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            *layers,
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(optimizer, loss_object)
    return model


def fit(model):
    model.fit(images, labels, batch_size=32, verbose=0, shuffle=False)


def told(name, act):
    try:
        act()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    else:
        print(f"{name}: no error")


def loop(gradients_of, function, optimizer=None):
    """Two steps of a loop of its own; the first may make the optimizer's variables."""
    model = model_with("sgd")
    optimizer = optimizer or tf.keras.optimizers.SGD(0.1)

    def step(x, y):
        grads = gradients_of(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    step = tf.function(step) if function else step
    for _ in range(2):
        step(images, labels)


def plain(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def too_late(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    hvd_tf.DistributedGradientTape(tape)
    return grads


def only_the_loss(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    hvd_tf.allreduce(loss)
    return tape.gradient(loss, model.trainable_variables)


def loss_of_all(model, x, y):
    with tf.GradientTape() as tape:
        loss = hvd_tf.allreduce(loss_object(y, model(x, training=True)))
    return tape.gradient(loss, model.trainable_variables)


def outputs_of_all(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(hvd_tf.allgather(model(x, training=True)) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def loss_beside(model, x, y):
    def both():
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
        return hvd_tf.allreduce(loss), tape.gradient(loss, model.trainable_variables)

    return tf.function(both)()[1]


def wrapped(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    tape = hvd_tf.DistributedGradientTape(tape)
    return tape.gradient(loss, model.trainable_variables)


def by_hand(model, x, y):
    grads = [hvd_tf.allreduce(grad) for grad in plain(model, x, y)]
    return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]


def nested(model, x, y):
    return tf.function(wrapped)(model, x, y)


def scaled():
    inner = tf.keras.optimizers.SGD(0.1)
    loop(wrapped, True, tf.keras.mixed_precision.LossScaleOptimizer(inner))


def statistics_alone():
    fit(model_with(tf.keras.optimizers.SGD(0.1), hvd_tf.SyncBatchNormalization()))


def wrapped_after_compile():
    optimizer = tf.keras.optimizers.SGD(0.1)
    model = model_with(optimizer)
    hvd.DistributedOptimizer(optimizer)
    fit(model)


def graph_of_tensorflow_1(wrap):
    tf1 = tf.compat.v1
    with tf.Graph().as_default(), tf1.Session() as session:
        weight = tf1.get_variable("weight", initializer=tf.ones([3, 1]))
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        optimizer = hvd_tf.DistributedOptimizer(optimizer) if wrap else optimizer
        train = optimizer.minimize(tf.reduce_mean(tf.square(weight)))
        session.run(tf1.global_variables_initializer())
        session.run(train)


def arguments(gradients_of):
    model = model_with("sgd")
    optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def apply(grads):
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    for _ in range(2):
        apply(gradients_of(model, images, labels))


def tape_for_tensorflow_1():
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = 2.0 * weight * (1 + hvd.rank())
    tape = hvd_tf.DistributedGradientTape(tape)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight]))
    assert float(weight) == 1.0 - 0.5 * 3.0, float(weight)


told("before init", lambda: fit(model_with("sgd")))
hvd.init()
# Each rank trains on images of its own. Some of these mistakes are found only by
# comparing the weights, which would stay equal if all ranks had the same images.
images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
told("unwrapped", lambda: fit(model_with(tf.keras.optimizers.Adam())))
for name, gradients_of in (
    ("plain tape", plain),
    ("tape too late", too_late),
    ("only the loss", only_the_loss),
    ("loss of all", loss_of_all),
    ("outputs of all", outputs_of_all),
    ("loss beside", loss_beside),
    ("wrapped tape", wrapped),
    ("by hand", by_hand),
    ("nested", nested),
):
    told(f"{name}, function", lambda act=gradients_of: loop(act, True))
    told(f"{name}, eager", lambda act=gradients_of: loop(act, False))
told("wrapped after compile", wrapped_after_compile)
told("loss scale, wrapped tape", scaled)
told("statistics alone", statistics_alone)
told("TensorFlow 1, unwrapped", lambda: graph_of_tensorflow_1(False))
told("TensorFlow 1, wrapped", lambda: graph_of_tensorflow_1(True))
told("arguments", lambda: arguments(wrapped))
told("plain arguments", lambda: arguments(plain))
told("TensorFlow 1, wrapped tape", tape_for_tensorflow_1)
