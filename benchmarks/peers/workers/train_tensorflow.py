"""One rank of a training with TensorFlow, in a loop of its own or in Keras's fit."""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import tensorflow as tf
from meeting import Meeting

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
keras = tf.keras
RATE = 0.01
CLASSES = 10


def cnn() -> Any:
    """A CNN with 378 thousand parameters: much to compute, little to reduce."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(200, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def mlp() -> Any:
    """An MLP with 20 million parameters: little to compute, much to reduce."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


MODELS = {"cnn": cnn, "mlp": mlp}


def data(model: Any, batch: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch, different on each rank."""
    random = np.random.default_rng(rank)
    x = random.random((batch, *model.inputs[0].shape[1:]), np.float32)
    return x, random.integers(CLASSES, size=batch)


def own_loop(model: Any, batch: int, by: Any) -> Callable[[], object]:
    """One step of gradient descent, written with a tape."""
    x, y = map(tf.constant, data(model, batch, by.RANK))
    variables = model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )

    def body() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / batch
        for variable, gradient in zip(
            variables, by.gradients(tape, loss, variables), strict=True
        ):
            variable.assign_sub(RATE * gradient)
        return loss

    by.begin(variables)
    step = by.function(body)
    return lambda: float(step())


def seconds_of_fit(
    model: Any, by: Any, task: dict[str, Any], name: str
) -> tuple[list[float], dict[str, float]]:
    """Steps of `fit`, from the end of one to the end of the next."""
    warm, steps = task["warm"], task["steps"]
    ends: list[float] = []
    watches: list[Any] = []

    def ended(batch: int, logs: Any = None) -> None:
        del batch, logs
        if len(ends) == warm - 1:
            _meet_while(by, f"{name} ready ", task["folder"], lambda: time.sleep(1e-3))
            watches.append(_watch(by))
        ends.append(time.perf_counter())

    x, y = data(model, task["batch"], by.RANK)
    optimizer, callbacks = keras.optimizers.SGD(RATE), []
    if hasattr(by, "in_fit"):
        optimizer, callbacks = by.in_fit(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=ended)
    model.fit(
        tf.data.Dataset.from_tensors((x, y)).repeat(),
        steps_per_epoch=warm + steps,
        verbose=0,
        callbacks=[*callbacks, counting],
    )
    facts = watches[0].facts(steps) if watches[0] else {}
    return [float(s) for s in np.diff(ends[warm - 1 :])], facts


def _watch(by: Any) -> Any:
    """Begins to measure the cost of communication, if the library supports it."""
    return by.Watch() if hasattr(by, "Watch") else None


def _meet_while(
    by: Any, what: str, folder: str, meanwhile: Callable[[], object]
) -> None:
    """Ranks that do not communicate wait here for each other."""
    if hasattr(by, "until_all_are"):
        by.until_all_are(what, folder, meanwhile)


def in_step(step: Callable[[], object], meeting: Meeting) -> Callable[[], object]:
    """The step, and then waiting for all ranks."""

    def both() -> None:
        step()
        meeting.wait()

    return both


def seconds_of_loop(
    step: Callable[[], object], by: Any, task: dict[str, Any], name: str
) -> tuple[list[float], dict[str, float]]:
    """Steps of a loop of its own, one after the other."""
    measuring.repeated(step)(task["warm"])
    _meet_while(by, f"{name} ready ", task["folder"], step)
    watch = _watch(by)
    measured = step
    if "in_step" in task:
        path = Path(task["folder"], f"{name} steps")
        measured = in_step(step, Meeting(path, by.RANK, by.SIZE))
    seconds = measuring.repeated(measured)(task["steps"])
    facts = watch.facts(task["steps"]) if watch else {}
    # Keeps the machine busy while other ranks still measure.
    _meet_while(by, f"{name} done ", task["folder"], step)
    return seconds, facts


def fingerprint(model: Any) -> str:
    """Hash of the bits of the model's variables."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Measures."""
    task = measuring.task()
    by = importlib.import_module(f"by_{task['by']}")
    seconds, facts, weights = {}, {}, {}
    for name in task["models"]:
        tf.random.set_seed(1)
        with by.scope():
            model = MODELS[name]()
        case = f"{name}/{task['batch']}"
        if task.get("loop") == "fit":
            found = seconds_of_fit(model, by, task, name)
        else:
            step = own_loop(model, task["batch"], by)
            found = seconds_of_loop(step, by, task, name)
        seconds[case], facts[case] = found
        weights[case] = fingerprint(model)
    measuring.leave(
        task, by.RANK, by.SIZE, by.VERSIONS, seconds, facts=facts, weights=weights
    )
    by.end()


if __name__ == "__main__":
    main()
