"""Statistics of batch normalisation that are estimated anew, over batches and ranks."""

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist


def rows(rank):
    """Three batches of different sizes; the ranks have different means."""
    rng = np.random.default_rng([6, rank])
    return [
        (rank + rng.standard_normal((n, 5))).astype("float32") for n in (8, 8, 4 + rank)
    ]


def build(kind=keras.layers.BatchNormalization):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((5,)),
            kind(),
            keras.layers.Dense(6, "tanh"),
            keras.layers.Dropout(0.5, seed=1),
            kind(),
        ]
    )


def estimated():
    model = build()
    weights = [v.numpy() for v in model.trainable_variables]
    seed = model.layers[2].seed_generator.state.numpy()
    batches = rows(tfdist.rank())
    count = tfdist.layers.estimate_moving_statistics(
        model, [(x, x[:, :1]) for x in batches]
    )
    assert count == 2
    assert all(
        (v.numpy() == w).all()
        for v, w in zip(model.trainable_variables, weights, strict=True)
    )
    assert (model.layers[2].seed_generator.state.numpy() == seed).all()
    assert model.layers[0].momentum == 0.99
    last = model.layers[-1]
    return [
        v.numpy()
        for layer in (model.layers[0], last)
        for v in (layer.moving_mean, layer.moving_variance)
    ]


def test_they_are_those_of_all_rows_of_all_ranks():
    whole = np.concatenate([x for rank in range(2) for x in rows(rank)])
    ranks = run_ranks(estimated, 2, timeout_s=60)
    for found in ranks:
        np.testing.assert_allclose(found[0], whole.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], whole.var(0), rtol=1e-5)
        assert all(
            a.tobytes() == b.tobytes() for a, b in zip(found, ranks[0], strict=True)
        )


def of_one_batch():
    model = build()
    endless = (batch for _ in range(1000) for batch in rows(tfdist.rank()))
    tfdist.layers.estimate_moving_statistics(model, endless, steps=1)
    return model.layers[0].moving_mean.numpy()


def test_one_step_uses_one_batch_of_each_rank():
    first = np.concatenate([rows(rank)[0] for rank in range(2)])
    for found in run_ranks(of_one_batch, 2, timeout_s=60):
        np.testing.assert_allclose(found, first.mean(0), rtol=1e-5, atol=1e-6)


def synchronised():
    model = build(tfdist.layers.SyncBatchNormalization)
    tfdist.layers.estimate_moving_statistics(model, rows(tfdist.rank()))
    return model.layers[0].moving_variance.numpy()


def test_synchronised_layers_have_the_moments_of_all_ranks():
    ranks = run_ranks(synchronised, 2, timeout_s=60)
    whole = np.concatenate([x for rank in range(2) for x in rows(rank)])
    for found in ranks:
        assert found.tobytes() == ranks[0].tobytes()
        np.testing.assert_allclose(found, whole.var(0), rtol=1e-5)


def without_batches():
    with pytest.raises(ValueError, match="at least one batch on at least one rank"):
        tfdist.layers.estimate_moving_statistics(build(), [])
    model = build()
    own = rows(0) if tfdist.rank() == 0 else []
    tfdist.layers.estimate_moving_statistics(model, own)
    return model.layers[0].moving_mean.numpy()


def test_a_rank_without_batches_gets_the_statistics_of_the_others():
    whole = np.concatenate(rows(0))
    for found in run_ranks(without_batches, 2, timeout_s=60):
        np.testing.assert_allclose(found, whole.mean(0), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_estimated_is_refused():
    tfdist.init()
    model = keras.Sequential([keras.layers.BatchNormalization()])
    for call, error, words in (
        (lambda: tfdist.layers.estimate_moving_statistics(1, []), TypeError, "Keras m"),
        (
            lambda: tfdist.layers.estimate_moving_statistics(build(), [], steps=0),
            ValueError,
            "steps to be at least 1",
        ),
        (
            lambda: tfdist.layers.estimate_moving_statistics(model, []),
            ValueError,
            "Expected a built model",
        ),
        (
            lambda: tfdist.layers.estimate_moving_statistics(
                build(lambda: keras.layers.BatchNormalization(renorm=True)), []
            ),
            NotImplementedError,
            "renorm=True",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


def frozen():
    model = build()
    model.layers[0].trainable = False
    own = float(tfdist.rank())
    model.layers[0].moving_mean.assign(np.full(5, own, "float32"))
    assert tfdist.layers.estimate_moving_statistics(model, rows(1)) == 1
    assert (model.layers[0].moving_mean.numpy() == own).all()
    assert (model.layers[-1].moving_mean.numpy() != 0).all()
    return True


def test_frozen_layers_keep_their_statistics():
    assert run_ranks(frozen, 2, timeout_s=60) == [True, True]


def test_statistics_that_are_not_finite_are_replaced():
    tfdist.init()
    model = build()
    model.layers[0].moving_mean.assign(np.full(5, np.nan, "float32"))
    model.layers[0].moving_variance.assign(np.full(5, np.inf, "float32"))
    tfdist.layers.estimate_moving_statistics(model, rows(1))
    whole = np.concatenate(rows(1))
    found = model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(found, whole.mean(0), rtol=1e-5, atol=1e-6)


def test_weights_that_a_call_changes_are_set_back():
    tfdist.init()
    keras.utils.set_random_seed(1)
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((5,)), dense, norm])
    before = [v.numpy() for v in dense.variables]
    tfdist.layers.estimate_moving_statistics(model, rows(1))
    for variable, value in zip(dense.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_layer_that_is_called_twice_is_refused_and_keeps_its_statistics():
    tfdist.init()
    inputs, norm = keras.Input((5,)), keras.layers.BatchNormalization()
    model = keras.Model(inputs, norm(norm(inputs)))
    with pytest.raises(NotImplementedError, match="called several times in a step"):
        tfdist.layers.estimate_moving_statistics(model, rows(1))
    assert (norm.moving_mean.numpy() == 0).all()
    assert norm.momentum == 0.99 and "call" not in vars(norm)


def test_layers_that_the_model_does_not_call_keep_their_statistics():
    class Partial(keras.Model):
        def __init__(self):
            super().__init__()
            kind = keras.layers.BatchNormalization
            self.used, self.unused, self.unbuilt = kind(), kind(), kind()

        def build(self, shape):
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, x, training=None):
            return self.used(x, training=training)

    tfdist.init()
    model = Partial()
    model.build((None, 5))
    model.unused.moving_mean.assign(np.full(5, 3, "float32"))
    model.unused.moving_variance.assign(np.full(5, 4, "float32"))
    assert tfdist.layers.estimate_moving_statistics(model, rows(1)) == 2
    np.testing.assert_array_equal(model.unused.moving_mean.numpy(), [3] * 5)
    np.testing.assert_array_equal(model.unused.moving_variance.numpy(), [4] * 5)
    assert (model.used.moving_mean.numpy() != 0).all()


def test_an_error_in_the_data_leaves_the_model_unchanged():
    tfdist.init()
    model = build()

    def broken():
        yield rows(1)[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        tfdist.layers.estimate_moving_statistics(model, broken())
    assert (model.layers[0].moving_mean.numpy() == 0).all()
