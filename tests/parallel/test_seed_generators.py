"""The masks of dropout on several ranks: distinct or equal, in every run alike."""

import os

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist
from tfdist.layers.seed_generators import states_of_generators


class Inner(keras.layers.Layer):
    """A generator in a layer in a layer, and one that two layers share."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(9)
        self.same = self.generator

    def call(self, x, training=False):
        if not training:
            return x
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)


def dropout_model(seed):
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    inner = keras.Sequential([keras.Input((16,)), Inner(), keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dropout(0.5), inner])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


class Trained(keras.Sequential):
    """Keeps what dropout made of ones in each step."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.seen.assign(self.layers[0](keras.ops.ones((1, 16)), training=True))
        return logs


def masks_in_fit(seeds, folder):
    """Masks of each step of two fits, and of one after saving and loading."""
    keras.utils.clear_session()
    # Every rank's own seed is another one, but rank 0's is what counts.
    keras.utils.set_random_seed(1 + 10 * tfdist.rank())
    model = Trained(
        [keras.Input((16,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    object.__setattr__(model, "seen", keras.Variable(np.zeros((1, 16), "float32")))
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    found = []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(model.seen.numpy()[0] > 0)

    first = tfdist.callbacks.BroadcastInitialState(seed_generators=seeds)
    ones = np.ones((4, 16), "float32")
    for _ in range(2):
        model.fit(
            *(ones, ones[:, :1]),
            batch_size=2,
            shuffle=False,
            verbose=0,
            callbacks=[first, Keep()],
        )
    path = os.path.join(folder, "m.keras")
    if tfdist.rank() == 0:
        keras.Sequential(model.layers).save(path)
    tfdist.barrier()
    loaded = keras.models.load_model(path)
    assert tfdist.layers.broadcast_seed_generators(loaded, seeds) == 1
    found.append(np.asarray(loaded.layers[0](np.ones((1, 16)), training=True))[0] > 0)
    return np.array(found)


@pytest.mark.parametrize(
    "seeds", ["distinct", pytest.param("equal", marks=pytest.mark.slow)]
)
def test_masks_in_fit_and_after_loading(seeds, tmp_path):
    first = run_ranks(masks_in_fit, 2, seeds, str(tmp_path))
    again = run_ranks(masks_in_fit, 2, seeds, str(tmp_path))
    alone = first[0]
    assert len({mask.tobytes() for mask in alone}) == len(alone)
    for rank, (masks, repeated) in enumerate(zip(first, again, strict=True)):
        assert masks.tobytes() == repeated.tobytes()
        for other in first[:rank]:
            if seeds == "equal":
                np.testing.assert_array_equal(masks, other)
            else:
                assert (masks != other).any(axis=1).all()


def states_in_a_loop(seeds, root):
    model = dropout_model(seed=3 + tfdist.rank())
    for _ in range(tfdist.rank() + 1):
        model(np.ones((1, 16), "float32"), training=True)
    count = tfdist.layers.broadcast_seed_generators(model, seeds, root=root)
    states = np.array([s.numpy() for s in states_of_generators(model)])
    tfdist.layers.broadcast_seed_generators(model, seeds, root=root)
    again = np.array([s.numpy() for s in states_of_generators(model)])
    return count, states, again


def test_every_generator_follows_from_that_of_the_root():
    results = run_ranks(states_in_a_loop, 3, "distinct", 2)
    for number in range(3):
        seeds = [int(states[number, 0]) % (2**31 - 2) for _, states, _ in results]
        assert len(set(seeds)) == 3
    for count, states, again in results:
        assert count == 3
        assert states[:, 1].tolist() == [3, 3, 3]  # where rank 2 is in its streams
        assert states.tobytes() == again.tobytes()
    root_state = results[2][1]
    for _, states, _ in run_ranks(states_in_a_loop, 3, "equal", 2):
        assert states.tobytes() == root_state.tobytes()


def other_numbers_of_generators():
    keras.utils.clear_session()
    layers = [keras.layers.Dropout(0.5) for _ in range(1 + tfdist.rank())]
    try:
        tfdist.layers.broadcast_seed_generators(keras.Sequential(layers))
    except tfdist.MismatchError as error:
        return str(error)
    return ""


def test_ranks_with_other_generators_are_an_error_on_all():
    for message in run_ranks(other_numbers_of_generators, 2):
        assert "1 on rank 0 and 2 on rank 1" in message
