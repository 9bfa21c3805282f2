"""mixed_float16: an overflow on one rank is an overflow on all."""

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

STEPS = 200
OVERFLOWS = list(range(1, STEPS, 2))
BATCH = 4


def samples(rank, size):
    """Batches of one rank; in every second step one rank in turn has too large ones."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(STEPS, BATCH, 3)).astype("float32")
    for step in OVERFLOWS:
        if rank == (step // 2) % size:
            x[step] = 6e4  # times the kernel beyond what float16 can hold
    return x.reshape(-1, 3), x.sum(axis=2).reshape(-1, 1)


class Watch(keras.callbacks.Callback):
    """What each step did."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.scales = []
        self.before = None

    def state(self):
        optimizer = self.model.optimizer
        inner = optimizer.inner_optimizer
        weights = [v.numpy().tobytes() for v in self.model.weights + inner.variables]
        return weights, float(optimizer.dynamic_scale)

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.state()

    def on_train_batch_end(self, batch, logs=None):
        weights, scale = self.state()
        self.seen.append([weights == self.before[0], scale / self.before[1]])
        self.scales.append(scale)


def fit(accumulate):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, kernel_initializer="ones"),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        adam = keras.optimizers.Adam(
            1e-3, gradient_accumulation_steps=2 if accumulate else None
        )
        scaled = keras.optimizers.LossScaleOptimizer(adam, initial_scale=256.0)
        model.compile(tfdist.DistributedOptimizer(scaled), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        watch = Watch()
        x, y = samples(tfdist.rank(), tfdist.size())
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
    finally:
        keras.config.set_dtype_policy("float32")
    weights = [v.numpy() for v in model.weights]
    return watch.seen, watch.scales, weights


@pytest.mark.parametrize(
    "accumulate", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_all_ranks_skip_and_halve_100_of_100(accumulate):
    ranks = run_ranks(fit, 2, accumulate, timeout_s=110)
    for seen, scales, weights in ranks:
        skipped = [step for step, (same, _) in enumerate(seen) if same]
        assert skipped == OVERFLOWS
        assert [ratio for _, ratio in seen] == [1.0, 0.5] * (STEPS // 2)
        assert scales == ranks[0][1]
        for a, b in zip(weights, ranks[0][2], strict=True):
            assert a.tobytes() == b.tobytes()
            assert np.isfinite(a).all()
