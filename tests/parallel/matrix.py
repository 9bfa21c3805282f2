"""The matrix of training styles: models x optimizers x options, and one cell of it.

A cell is trained on several ranks and compared with one process on the concatenated
batches. All models are the same function with the same first weights, and
`steps_per_execution` and `jit_compile` change how steps are run, not what they compute:
so one reference serves many cells.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.core import native
from tfdist.gradients.bucketing import cut_buckets

STEPS, EPOCHS, GLOBAL_BATCH = 8, 3, 16
ACCUMULATION = 4
WIDTHS = (6, 12, 1)
# Two buckets: the first closes with the last layer.
BUCKETS = {
    "TFDIST_FIRST_BUCKET_BYTES": 32,
    "TFDIST_BUCKET_BYTES": 1 << 20,
    "TFDIST_FUSION_BYTES": 1 << 20,
}

MODELS = ("functional", "subclassed", "own step")
OPTIMIZERS = {
    "SGD": lambda **o: keras.optimizers.SGD(0.05, momentum=0.9, **o),
    "Adam": lambda **o: keras.optimizers.Adam(0.01, **o),
    "AdamW": lambda **o: keras.optimizers.AdamW(0.01, weight_decay=0.02, **o),
    "Lamb": lambda **o: keras.optimizers.Lamb(0.02, **o),
    "Muon": lambda **o: keras.optimizers.Muon(0.01, **o),
    "Adafactor": lambda **o: keras.optimizers.Adafactor(0.02, **o),
}
# Arguments of the optimizer, and of compile.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipnorm": ({"clipnorm": 0.02}, {}),
    "global_clipnorm": ({"global_clipnorm": 0.05}, {}),
    "accumulation": ({"gradient_accumulation_steps": ACCUMULATION}, {}),
    "EMA": ({"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 7}, {}),
    "mixed_float16": ({}, {}),
    "steps_per_execution": ({}, {"steps_per_execution": 3}),
    "jit_compile": ({}, {"jit_compile": True}),
}
FACTORS = (MODELS, tuple(OPTIMIZERS), tuple(OPTIONS))
Cell = tuple[str, str, str]


def cells() -> list[Cell]:
    """All 144, in the order of `FACTORS`."""
    return list(itertools.product(*FACTORS))


def quick() -> list[Cell]:
    """8 cells: one of each option, which have every model and every optimizer.

    How steps are run comes last, with the optimizer of the first cell: one reference
    serves them all.
    """
    more = len(OPTIONS) - len(OPTIMIZERS)
    optimizers = [*OPTIMIZERS, *[next(iter(OPTIMIZERS))] * more]
    return [
        (MODELS[place % len(MODELS)], optimizer, option)
        for place, (optimizer, option) in enumerate(
            zip(optimizers, OPTIONS, strict=True)
        )
    ]


def same_result(option: str) -> str:
    """The option whose reference serves: how steps are run changes no result."""
    return "plain" if option in ("steps_per_execution", "jit_compile") else option


def updates(option: str) -> int:
    """How often the weights change, and so how often the gradients are reduced."""
    steps = STEPS * EPOCHS
    return steps // ACCUMULATION if option == "accumulation" else steps


def buckets() -> int:
    """Operations of one reduction, from the sizes of the gradients."""
    shapes = [s for a, b in itertools.pairwise(WIDTHS) for s in ((a, b), (b,))]
    return len(
        cut_buckets(
            [4 * int(np.prod(shape)) for shape in shapes],
            ["float32"] * len(shapes),
            first_bytes=BUCKETS["TFDIST_FIRST_BUCKET_BYTES"],
            bucket_bytes=BUCKETS["TFDIST_BUCKET_BYTES"],
            fusion_bytes=BUCKETS["TFDIST_FUSION_BYTES"],
        )
    )


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Small targets: their gradients, times the loss scale, have to fit in float16."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-1, 1, size=(STEPS * GLOBAL_BATCH, WIDTHS[0])).astype("float32")
    y = 0.3 * np.sin(2 * x[:, :1]) + 0.2 * x[:, 1:2] * x[:, 2:3] + 0.3
    return x, y.astype("float32")


def _layers(seed: int) -> list[keras.layers.Layer]:
    activations = ("tanh", None)
    return [
        keras.layers.Dense(
            width,
            activation=activation,
            kernel_initializer=keras.initializers.GlorotUniform(seed + i),
        )
        for i, (width, activation) in enumerate(
            zip(WIDTHS[1:], activations, strict=True)
        )
    ]


class Subclassed(keras.Model):
    """Built by its first batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.steps = _layers(seed)

    def call(self, x: Any) -> Any:
        for layer in self.steps:
            x = layer(x)
        return x


class OwnStep(keras.Model):
    """The custom `train_step` of Keras's guide, with the scale of mixed precision."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def make_model(kind: str, seed: int) -> keras.Model:
    """One of `MODELS`."""
    if kind == "subclassed":
        return Subclassed(seed)
    x = first = keras.Input(WIDTHS[:1])
    for layer in _layers(seed):
        x = layer(x)
    return (OwnStep if kind == "own step" else keras.Model)(first, x)


@contextlib.contextmanager
def _policy(option: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16" if "float16" in option else "float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def train(cell: Cell, *, alone: bool) -> dict[str, Any]:
    """Trains one cell; what it ended with.

    Args:
        cell: a model, an optimizer and an option.
        alone: whether plain Keras trains on the concatenated batches; otherwise this
            rank on its share.

    Returns:
        "state", the weights and slots; "losses" of the epochs; "reductions", how many
        buckets of gradients were reduced.
    """
    kind, name, option = cell
    of_optimizer, of_compile = OPTIONS[option]
    keras.utils.clear_session()
    with _policy(option):
        model = make_model(kind, seed=0 if alone else 100 * tfdist.rank())
        optimizer = OPTIMIZERS[name](**of_optimizer)
        if not alone:
            optimizer = tfdist.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", **{"jit_compile": False, **of_compile})
        if alone:
            if model.built:  # or Keras traces the step twice
                model.optimizer.build(model.trainable_variables)
            x, y = samples()
            options: dict[str, Any] = {"x": x, "y": y, "batch_size": GLOBAL_BATCH}
        else:
            size = GLOBAL_BATCH // tfdist.size()
            options = {"x": tfdist.data.shard(samples(), batch_size=size)}
            options["callbacks"] = [
                tfdist.callbacks.BroadcastInitialState(),
                tfdist.callbacks.MetricAverage(),
            ]
            native.take_records()
        history = model.fit(epochs=EPOCHS, shuffle=False, verbose=0, **options).history
    rows = [] if alone else native.take_records()
    state = [*model.weights, *model.optimizer.variables]
    return {
        "state": [v.numpy() for v in state if not v.path.endswith("learning_rate")],
        "losses": history["loss"],
        "reductions": sum(row["name"].startswith("gradients.") for row in rows),
    }


def train_all(chosen: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Cells one after the other, on a rank."""
    return [train((cell[0], cell[1], cell[2]), alone=False) for cell in chosen]


def deviation(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest element expected."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected))
    scale = float(np.max(np.abs(expected), initial=0.0)) or 1.0
    return float(np.max(difference, initial=0.0)) / scale
