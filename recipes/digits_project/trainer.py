"""The training on all ranks. The lines with `tfdist` connect the ranks."""

import logging
import time
from pathlib import Path
from typing import Any

import keras
from config import Config
from dataset import Data

import tfdist

log = logging.getLogger("digits")


class LogEpochs(keras.callbacks.Callback):
    """Writes a line to the log for each epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the line."""
        numbers = ", ".join(
            f"{name} {value:.4f}" for name, value in (logs or {}).items()
        )
        log.info("epoch %d of %d: %s", epoch + 1, self.params["epochs"], numbers)


def train(model: keras.Model, data: Data, config: Config, folder: Path) -> dict:
    """Trains the model; rank 0 saves it after each epoch.

    Returns:
        The results: speed, and the loss and accuracy on the test data.

    Raises:
        ValueError: the global batch cannot be divided among the ranks, or is larger
            than the data.
    """
    ranks, samples = tfdist.size(), len(data.train[0])
    if config.batch_size % ranks or config.batch_size > samples:
        raise ValueError(
            f"Expected a batch_size divisible by {ranks} ranks and not above the "
            f"{samples} training samples, got {config.batch_size}."
        )
    batches = tfdist.data.shard(
        data.train,
        batch_size=config.batch_size // ranks,
        shuffle=True,
        seed=config.seed,
    )
    rate = keras.optimizers.schedules.CosineDecay(
        config.lr_init, config.epochs * len(batches)
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(rate)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    literal = str(folder).replace("{", "{{").replace("}", "}}")  # no metric names
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
        tfdist.callbacks.Checkpoint(f"{literal}/model.keras"),
        tfdist.callbacks.RankZeroOnly(keras.callbacks.CSVLogger(folder / "log.csv")),
        LogEpochs(),
    ]
    begin = time.perf_counter()
    model.fit(
        batches, epochs=config.epochs, callbacks=callbacks, verbose=0, shuffle=False
    )
    seconds = time.perf_counter() - begin
    loss, accuracy = tfdist.evaluate(model, *data.test, verbose=0)
    return {
        "ranks": ranks,
        "seconds": round(seconds, 2),
        "samples_per_s": round(config.epochs * samples / seconds),
        "test_loss": round(float(loss), 5),
        "test_accuracy": round(float(accuracy), 5),
    }
