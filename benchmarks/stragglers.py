"""Cost of `tfdist.callbacks.Stragglers` in a small model, whose steps are short.

    tfdistrun -np 2 python benchmarks/stragglers.py

In one `fit`, blocks of 100 steps with the callback and without it alternate, so that
other programs on the machine disturb both alike. A round is 20 blocks of each kind; the
result is the median over its blocks. Beside it stand the median time of the callback's
two hooks in a step, and the number and time of the comparisons, which include the
waiting for the other rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import keras
import numpy as np

import tfdist

BLOCK, BLOCKS = 100, 40
COMPARISON_US = 150.0  # a hook that takes longer has compared the ranks
HOOKS = ("on_train_batch_begin", "on_train_batch_end")


class Alternating(keras.callbacks.Callback):
    """Calls the hooks of a callback in every second block of steps."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.callback = callback
        self.steps, self.began_s = 0, 0.0
        self.rates: dict[bool, list[float]] = {False: [], True: []}
        self.hook_us: list[float] = []

    def set_model(self, model: keras.Model) -> None:
        """Passes on the model."""
        super().set_model(model)
        self.callback.set_model(model)
        self.callback.set_params(self.params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        self.callback.on_train_begin(logs)
        self.steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes on the epoch."""
        self.callback.on_epoch_begin(epoch, logs)

    def _call(self, hook: str, batch: int) -> None:
        begin_s = time.perf_counter()
        getattr(self.callback, hook)(batch)
        self.hook_us.append((time.perf_counter() - begin_s) * 1e6)

    @property
    def _is_on(self) -> bool:
        return self.steps // BLOCK % 2 == 1

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Calls the hook, in some blocks."""
        if self._is_on:
            self._call(HOOKS[0], batch)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Calls the hook, in some blocks; ends the block."""
        if self._is_on:
            self._call(HOOKS[1], batch)
        self.steps += 1
        if self.steps % BLOCK:
            return
        now_s = time.perf_counter()
        was_on = not self._is_on
        if self.steps > 2 * BLOCK:  # the first blocks trace, and begin to compare
            self.rates[was_on].append(BLOCK / (now_s - self.began_s))
        self.began_s = now_s


def main() -> None:
    """Prints a line for each round, and the medians."""
    parser = argparse.ArgumentParser(description="Cost of Stragglers.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    tfdist.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(tfdist.rank())
    x = rng.random((32 * BLOCK * (BLOCKS + 2), 20), "float32")
    pairs = []
    for number in range(rounds):
        callback = Alternating(tfdist.callbacks.Stragglers())
        callbacks = [tfdist.callbacks.BroadcastInitialState(), callback]
        model.fit(
            *(x, x[:, :1]), batch_size=32, verbose=0, shuffle=False, callbacks=callbacks
        )
        off, on = (statistics.median(callback.rates[kind]) for kind in (False, True))
        pairs.append((off, on))
        compared_us = [one for one in callback.hook_us if one > COMPARISON_US]
        if tfdist.rank() == 0:
            print(
                f"round {number + 1}: {off:.0f} steps/s without, {on:.0f} with it "
                f"({on / off:.3f}); hooks {2 * statistics.median(callback.hook_us):.1f}"
                f" us per step; {len(compared_us)} comparisons of "
                f"{statistics.median(compared_us) / 1000:.2f} ms",
                flush=True,
            )
    if tfdist.rank() == 0:
        ratios = sorted(on / off for off, on in pairs)
        print(
            f"median of {rounds} rounds: {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
