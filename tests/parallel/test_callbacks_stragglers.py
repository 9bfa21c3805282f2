"""Stragglers: the ranks find out which of them is slow, and say it once."""

import io
import logging
import time

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import Progress, Stragglers, UnevenData

BATCH, STEPS, LATE_S = 8, 12, 0.02


def build_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def samples(steps=STEPS):
    x = np.random.default_rng(0).normal(size=(steps * BATCH, 4)).astype("float32")
    return x, x[:, :1]


class Late(keras.callbacks.Callback):
    """One rank takes longer for its steps, up to an epoch."""

    def __init__(self, rank, until):
        super().__init__()
        self.rank, self.until, self.epoch = rank, until, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        is_late = tfdist.rank() == self.rank and self.epoch < self.until
        time.sleep(LATE_S * (3 if is_late else 1))


class Log(logging.Handler):
    """Texts of the log, with their levels."""

    def __init__(self):
        super().__init__()
        self.texts = []
        logger = logging.getLogger("tfdist")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        if "slower" in record.getMessage():
            self.texts.append(f"{record.levelname} {record.getMessage()}")

    def take(self):
        logging.getLogger("tfdist").removeHandler(self)
        return self.texts


def fitted():
    log, shown = Log(), io.StringIO()
    watch = Stragglers(seconds=0.4)
    callbacks = [watch, Late(1, until=2), Progress(8, every_s=0.1, file=shown)]
    build_model().fit(
        *samples(), batch_size=BATCH, epochs=5, verbose=0, callbacks=callbacks
    )
    return [log.take(), shown.getvalue()]


def test_a_slow_rank_is_named_once_when_it_is_slow_and_once_when_it_is_not():
    (texts, shown), (others, silent) = run_ranks(fitted, 2)
    assert [text.split()[0] for text in texts] == ["WARNING", "INFO"], texts
    assert texts[0].startswith("WARNING rank 1 (host ")
    assert "times slower than the median for" in texts[0]
    assert 1.8 < float(texts[0].split("has been ")[1].split()[0]) < 3.5
    assert texts[1].startswith("INFO rank 1") and "as fast as the others" in texts[1]
    assert others == [] and silent == ""
    assert "rank 1 (host " in shown and "times slower than the median" in shown
    assert "slower" not in shown.splitlines()[-1]


def alike():
    log = Log()
    watch = Stragglers(seconds=0.2, factor=2)
    callbacks = [watch, Late(0, until=0)]
    build_model().fit(
        *samples(), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks
    )
    return log.take()


def in_a_loop():
    log, model = Log(), build_model()
    hooks = keras.callbacks.CallbackList([Stragglers(seconds=0.2)])
    late = Late(1, until=1)
    variables = model.trainable_variables
    x, y = samples(1)
    hooks.on_train_begin()
    for step in range(14):
        hooks.on_train_batch_begin(step)
        late.on_train_batch_begin(step)
        with tfdist.DistributedGradientTape() as tape:
            loss = keras.ops.mean((model(x) - y) ** 2)
        tape.gradient(loss, variables)
        hooks.on_train_batch_end(step)
    hooks.on_train_end()
    return log.take()


def test_ranks_that_are_alike_are_not_slow():
    assert run_ranks(alike, 2) == [[], []]


def test_a_slow_rank_is_named_in_a_custom_loop():
    texts, others = run_ranks(in_a_loop, 2)
    assert len(texts) == 1 and "rank 1" in texts[0] and others == []


def with_uneven_data():
    log = Log()
    steps = (8, 20)[tfdist.rank()]
    callbacks = [UnevenData(), Stragglers(seconds=0.2), Late(1, until=9)]
    build_model().fit(
        *samples(steps), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks
    )
    return len(log.take())


@pytest.mark.slow
def test_ranks_may_have_different_numbers_of_steps():
    """Rank 1 is slow as long as rank 0 has data; then nobody can tell."""
    named, silent = run_ranks(with_uneven_data, 2)
    assert named in (0, 1, 2) and silent == 0
