"""Trains with `fit` and by hand, and prints what the ranks end with; each line once.

Started by tests/horovod_engine/test_launchers.py on two ranks, under every launcher.
"""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfdist


def digest(weights):
    data = b"".join(np.ascontiguousarray(w).tobytes() for w in weights)
    return hashlib.sha256(data).hexdigest()[:16]


def data_of(rank, size):
    """Small integers: sums of them are exact, whatever their order."""
    numbers = np.random.default_rng(7).integers(-2, 3, (16, 4))
    x = numbers.astype("float32")[rank::size]
    return x, x.sum(axis=1, keepdims=True)


def model_of(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
    )


def by_fit(rank, size):
    model = model_of(seed=rank)  # the broadcast makes them equal
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.03125, momentum=0.5))
    model.compile(optimizer, "mse", metrics=["mae"])
    x, y = data_of(rank, size)
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.MetricAverage(),
        ],
    )
    return model.get_weights(), history.history["loss"][-1]


def by_tape(rank, size):
    model = model_of(seed=3)
    optimizer = keras.optimizers.SGD(0.03125)
    tfdist.broadcast_variables(model.variables)
    x, y = map(tf.constant, data_of(rank, size))

    @tf.function
    def step():
        with tfdist.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    for _ in range(4):
        step()
    return model.get_weights()


def with_a_constant(rank):
    """On rank 0 the first input is known to be 0 when the graph is optimized."""
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

    @tf.function
    def step():
        first = tfdist.allreduce(a * float(rank), op=tfdist.ReduceOp.SUM)
        return first, tfdist.allreduce(b * (rank + 1.0), op=tfdist.ReduceOp.SUM)

    return [[x.numpy().tolist() for x in step()] for _ in range(5)]


def main():
    tfdist.init()
    rank, size = tfdist.rank(), tfdist.size()
    fitted, loss = by_fit(rank, size)
    taped = by_tape(rank, size)
    held = with_a_constant(rank) == [[[1.0, 2.0], [9.0, 12.0]]] * 5
    found = tfdist.allgather_object([digest(fitted), digest(taped), loss, held])
    if rank == 0:
        print(f"ranks {size}")
        for place, what in enumerate(("fit", "tape", "loss")):
            values = {one[place] for one in found}
            print(what, "equal" if len(values) == 1 else f"differ: {values}")
        print("constants", "right" if all(one[3] for one in found) else "wrong")
        print("weights", " ".join(f"{w:.6f}" for w in np.concatenate(taped, None)))
    tfdist.shutdown()


if __name__ == "__main__":
    main()
