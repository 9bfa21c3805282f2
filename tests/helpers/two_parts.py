"""A model of two layers that share one loss, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class TwoParts(keras.Model):
    """The sum of two dense layers; `both` holds their optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(1, name=name) for name in "ab"]
        self.both: Sequence[keras.optimizers.Optimizer] = []

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build(shape)

    def call(self, x: Any) -> Any:
        return self.parts[0](x) + self.parts[1](x)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        for part, optimizer in zip(self.parts, self.both, strict=True):
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}
