"""Moving statistics of ordinary batch normalisation, combined over the ranks."""

import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

BATCHES = (5, 11, 16)


def rows(rank):
    rng = np.random.default_rng(rank)
    return 4.0 * rank + rng.normal(size=(BATCHES[rank], 3)) * (1.0 + rank)


def norm(**options):
    """What it has moved to after one batch is that batch's mean and variance."""
    return keras.layers.BatchNormalization(momentum=0.0, **options)


def combined(weighted, dtype):
    layer = norm(dtype=dtype)
    rank = tfdist.rank()
    layer(rows(rank).astype(dtype), training=True)
    weight = {"weight": BATCHES[rank]} if weighted else {}
    assert tfdist.layers.combine_moving_statistics(layer, **weight) == 1
    first = [layer.moving_mean.numpy(), layer.moving_variance.numpy()]
    tfdist.layers.combine_moving_statistics(layer, **weight)
    return first, [layer.moving_mean.numpy(), layer.moving_variance.numpy()]


def test_weighted_by_batch_they_are_those_of_all_rows():
    data = np.concatenate([rows(rank) for rank in range(3)])
    for (mean, variance), _ in run_ranks(combined, 3, True, "float64"):
        np.testing.assert_allclose(mean, data.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(variance, data.var(axis=0), rtol=1e-12)


def test_unweighted_they_are_mean_of_variances_and_variance_of_means():
    ranks = [rows(rank) for rank in range(3)]
    means = np.stack([r.mean(axis=0) for r in ranks])
    variances = np.stack([r.var(axis=0) for r in ranks])
    for (mean, variance), _ in run_ranks(combined, 3, False, "float64"):
        np.testing.assert_allclose(mean, means.mean(axis=0), rtol=1e-12)
        expected = variances.mean(axis=0) + means.var(axis=0)
        np.testing.assert_allclose(variance, expected, rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_statistics_that_are_equal_keep_their_bits(weighted):
    results = run_ranks(combined, 3, weighted, "float32")
    for once, twice in results:
        for a, b, c in zip(once, twice, results[0][0], strict=True):
            assert a.tobytes() == b.tobytes() == c.tobytes()


def renormalised():
    """All that inference uses is combined, what training uses stays."""
    layer = norm(renorm=True, renorm_momentum=0.5, dtype="float64")
    layer(rows(tfdist.rank()), training=True)
    own = [layer.renorm_mean.numpy(), layer.renorm_stddev.numpy()]
    tfdist.layers.combine_moving_statistics(layer, weight=BATCHES[tfdist.rank()])
    for before, after in zip(
        own, (layer.renorm_mean, layer.renorm_stddev), strict=True
    ):
        np.testing.assert_array_equal(before, after.numpy())
    variables = layer.moving_mean, layer.moving_variance, layer.moving_stddev
    return [v.numpy() for v in variables], layer.epsilon


def test_batch_renormalisation_too():
    data = np.concatenate([rows(rank) for rank in range(3)])
    for (mean, variance, deviation), epsilon in run_ranks(renormalised, 3):
        np.testing.assert_allclose(mean, data.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(variance, data.var(axis=0), rtol=1e-12)
        np.testing.assert_allclose(deviation**2, variance + epsilon, rtol=1e-12)


def refused(kind):
    rank = tfdist.rank()
    keras.utils.clear_session()
    more = int(kind == "layers" and rank == 1)
    width = 4 if kind == "width" and rank == 1 else 3
    norms = [norm() for _ in range(2 + more)]
    model = keras.Sequential([keras.Input((width,)), *norms])
    weight = {"weight": -1.0 if rank == 1 else 1.0, "weights": 0.0}.get(kind, 1.0)
    try:
        tfdist.layers.combine_moving_statistics(model, weight=weight)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    except tfdist.MismatchError as error:
        return f"MismatchError: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("layers", "MismatchError: .*rank 0 has 2 built layers, rank 1 has 3"),
        ("width", r"MismatchError: .*layer 0 is .*\(3,\).* rank 0, .*\(4,\).* rank 1"),
        ("weight", "ValueError: .*at least 0, got -1.0 on rank 1"),
        ("weights", "ValueError: .*above 0 on at least one rank"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(kind, words):
    for message in run_ranks(refused, 2, kind):
        assert re.match(words, message), message


def of_some():
    """Ranks 0 and 2 combine theirs; rank 1 keeps its own."""
    some = tfdist.add_process_set([0, 2])
    layer = norm(dtype="float64")
    layer(rows(tfdist.rank()), training=True)
    if some.included():
        weight = BATCHES[tfdist.rank()]
        tfdist.layers.combine_moving_statistics(layer, weight=weight, process_set=some)
    return layer.moving_variance.numpy()


def test_a_process_set_combines_its_own():
    found = run_ranks(of_some, 3)
    both = np.concatenate([rows(0), rows(2)]).var(axis=0)
    expected = [both, rows(1).var(axis=0), both]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def model_with_norm():
    keras.utils.clear_session()
    keras.utils.set_random_seed(9)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1),
        ]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def share_of_rows():
    x = np.concatenate([rows(rank) for rank in range(3)]).astype("float32")
    return tfdist.data.shard((x, x[:, :1]), batch_size=3)


def state(model):
    return b"".join(v.numpy().tobytes() for v in model.weights)


def fitted(folder, combine):
    """The model that is evaluated and saved, and the weights that are trained."""
    model, data = model_with_norm(), share_of_rows()
    evaluated, path = [], os.path.join(folder, f"rank{tfdist.rank()}.keras")

    class Watch(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            if batch == 0:
                evaluated.append(state(self.model))

    callbacks = [tfdist.callbacks.MetricAverage(), Watch()]
    if combine:
        callbacks.insert(0, tfdist.callbacks.CombineMovingStatistics())
    callbacks.append(keras.callbacks.ModelCheckpoint(path))
    history = model.fit(
        data, epochs=2, verbose=0, shuffle=False, validation_data=data,
        callbacks=callbacks,
    ).history  # fmt: skip
    saved = state(keras.models.load_model(path))
    kernels = b"".join(v.numpy().tobytes() for v in model.trainable_weights)
    return evaluated, saved, kernels, history["loss"], history["val_loss"]


def test_in_fit_all_ranks_evaluate_and_save_one_model(tmp_path):
    results = run_ranks(fitted, 2, str(tmp_path), True)
    assert results[0] == results[1]
    evaluated, saved, kernels, loss, _ = results[0]
    assert evaluated[-1] == saved
    plain = run_ranks(fitted, 2, str(tmp_path), False)
    assert plain[0][0] != plain[1][0], "without it the ranks' models differ"
    assert plain[0][1] != plain[1][1]
    for _, _, others, other_loss, _ in plain:
        assert (others, other_loss) == (kernels, loss), "training does not change"


def evaluated_outside():
    model, data = model_with_norm(), share_of_rows()
    model.fit(data, verbose=0, shuffle=False)
    before = state(model)
    found = model.evaluate(
        data,
        verbose=0,
        callbacks=[
            tfdist.callbacks.CombineMovingStatistics(weight=1 + tfdist.rank()),
            tfdist.callbacks.MetricAverage(),
        ],
    )
    return found, before, state(model)


def test_evaluate_combines_first():
    (one, before, after), (other, others, afterwards) = run_ranks(evaluated_outside, 2)
    assert before != others
    assert (one, after) == (other, afterwards)


def saved_between_epochs(path):
    """Checkpoint needs no other callback."""
    model, data = model_with_norm(), share_of_rows()
    steps = [tfdist.callbacks.Checkpoint(path, save_freq=2)]
    model.fit(data, verbose=0, shuffle=False, steps_per_epoch=2, callbacks=steps)
    tfdist.barrier()
    return state(keras.models.load_model(path)), state(model)


def test_a_checkpoint_holds_combined_statistics(tmp_path):
    path = str(tmp_path / "model.keras")
    (one, _), (other, own) = run_ranks(saved_between_epochs, 2, path)
    assert one == other == own


def validating_on_one_rank():
    model, data = model_with_norm(), share_of_rows()
    validation = {"validation_data": data} if tfdist.rank() == 0 else {}
    try:
        model.fit(
            data,
            verbose=0,
            shuffle=False,
            callbacks=[tfdist.callbacks.CombineMovingStatistics()],
            **validation,
        )
    except tfdist.MismatchError as error:
        return str(error)
    return ""


def test_validation_on_some_ranks_is_an_error_on_all():
    for message in run_ranks(validating_on_one_rank, 2):
        assert "Expected the same validation_data in fit on every rank" in message


class OwnStep(keras.Sequential):
    """Its gradients go to an optimizer that is not wrapped, so that nobody reduces."""

    reduces = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        if self.reduces:
            tape = tfdist.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step(reduces, built):
    keras.utils.clear_session()
    layers = [tfdist.layers.SyncBatchNormalization(), keras.layers.Dense(1)]
    model = OwnStep([keras.Input((3,)), *layers] if built else layers)
    model.reduces = reduces
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x = np.ones((4, 3), "float32")
    start = tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()
    try:
        model.fit(x, x[:, :1], verbose=0, callbacks=list(start))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_moments_do_not_count_as_a_reduction_of_gradients(built):
    for message in run_ranks(own_step, 2, False, built):
        assert "The first step reduced no gradients" in message
    assert run_ranks(own_step, 2, True, built) == ["", ""]


def kerass_own(converted):
    """Keras's `synchronized=True` does nothing without tf.distribute."""
    keras.utils.clear_session()
    layers = [keras.Input((3,)), norm(synchronized=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    if converted:
        tfdist.layers.synchronize_batch_normalization(model)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", jit_compile=False)
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    x = tf.ones((4, 3))
    try:
        model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "converted", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_kerass_own_synchronisation_is_refused_before_the_first_step(converted):
    for message in run_ranks(kerass_own, 2, converted):
        if converted:
            assert message == ""
        else:
            assert "tfdist.layers.synchronize_batch_normalization(model)" in message
