"""What differs between ranks that train together: in a second fit, and in a file.

The loss is the output, so that a gradient is a mean of the inputs: all numbers are
exact, and results are compared bitwise.
"""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import BroadcastInitialState, Checkpoint
from tfdist.callbacks._per_rank_state import average_accumulated

STEPS = 6


def new_model(local=False):
    """The sum of two layers; gradients of two batches make an update."""
    keras.utils.clear_session()
    given = keras.Input((1,))
    parts = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)
        for name in ("own", "shared")
    ]
    model = keras.Model(given, keras.layers.Add()([part(given) for part in parts]))
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2),
        local_variables=parts[:1] if local else None,
    )
    model.compile(optimizer, lambda y, out: out, jit_compile=False)
    return model


def fit(model, steps, *callbacks, epochs=1):
    """Takes some of the steps 1, 2, 3, ...; rank r's inputs are 1 + 2 r times that."""
    x = np.array(steps, "float32").reshape(-1, 1) * (1 + 2 * tfdist.rank())
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1)
    if epochs > 1:
        data = data.repeat()
    model.fit(
        data,
        epochs=epochs,
        steps_per_epoch=len(steps) // epochs,
        verbose=0,
        callbacks=[BroadcastInitialState(), *callbacks],
    )


def state(model):
    values = [v.numpy() for v in model.weights + model.optimizer.variables]
    return b"".join(value.tobytes() for value in values)


def shared(model):
    return float(model.get_layer("shared").kernel.numpy()[0, 0])


def two_fits(local, folder):
    """One fit of six steps; two of three; one that saves after three."""
    whole, halves, saving = new_model(local), new_model(local), new_model(local)
    fit(whole, range(1, 7))
    fit(halves, (1, 2, 3))
    fit(halves, (4, 5, 6))
    fit(saving, range(1, 7), Checkpoint(f"{folder}/{{epoch}}.keras"), epochs=2)
    return [*map(state, (whole, halves, saving)), shared(whole)]


@pytest.mark.parametrize("local", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_second_fit_and_a_file_in_between_change_nothing(local, tmp_path):
    ranks = run_ranks(two_fits, 2, local, str(tmp_path))
    # The means of two batches of two ranks: 3, 7 and 11.
    v1, v2 = -3.0, -3.0 * 0.5 - 7.0
    expected = 1 + v1 + v2 + (v2 * 0.5 - 11.0)
    for whole, halves, saving, value in ranks:
        assert whole == halves == saving
        assert value == expected
    assert (ranks[0][0] == ranks[1][0]) != local


def resumed(folder):
    """Goes on from what was saved after three steps, where a gradient waits."""
    saving, model = new_model(), new_model()
    fit(saving, range(1, 7), Checkpoint(f"{folder}/{{epoch}}.keras"), epochs=2)
    tfdist.restore(model, f"{folder}/1.keras")
    fit(model, (4, 5, 6))
    return [state(saving), state(model)]


def test_a_training_goes_on_from_the_gradients_of_all_ranks(tmp_path):
    for whole, found in run_ranks(resumed, 2, str(tmp_path)):
        assert found == whole


def loaded_on_rank_0(folder):
    """The states when three fits begin; before the last two rank 0 loads something."""
    begun = []
    see = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: begun.append(state(model))
    )
    model = new_model(local=True)
    path = f"{folder}/{tfdist.rank()}.keras"
    fit(model, (1, 2, 3), see)
    model.save(path)
    fit(model, (4, 5), see)
    if tfdist.rank() == 0:
        model.load_weights(path)  # other counts of batches
    fit(model, (6, 7), see)
    if tfdist.rank() == 0:
        model.get_layer("shared").kernel.assign([[3.0]])  # equal ones
    fit(model, (8,), see)
    return begun


def test_what_rank_0_alone_has_loaded_reaches_all_whole(tmp_path):
    first, second, third, fourth = zip(
        *run_ranks(loaded_on_rank_0, 2, str(tmp_path)), strict=True
    )
    assert second[0] != second[1]  # local variables, and gradients that wait
    for one, other in (first, third, fourth):
        assert one == other


def weighted():
    """Rank 0 has no samples; in between all take the mean of what is added up."""
    v = tf.Variable(0.0)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    for grad, weight in ((3.0, 2), (6.0, 4)):
        grad, weight = (grad, weight) if tfdist.rank() else (100.0, 0)
        optimizer.apply([tf.constant(grad)], [v], weight=weight)
        average_accumulated(SimpleNamespace(optimizer=optimizer))
    return float(v)


def test_weighted_gradients_that_were_averaged_make_the_same_update():
    assert run_ranks(weighted, 2) == [-(2 * 3.0 + 4 * 6.0) / 6] * 2


def taken_half_way():
    """Weighted batches wait when all take the weights of rank 0."""
    model = new_model()
    variables = model.trainable_variables

    def take(grad, weight):
        grads = [tf.fill(v.shape, grad) for v in variables]
        model.optimizer.apply(grads, variables, weight=weight)

    take(16.0 * (1 + tfdist.rank()), 3 + tfdist.rank())
    if tfdist.rank() == 0:
        model.get_layer("shared").kernel.assign([[3.0]])
    begin = BroadcastInitialState()
    begin.set_model(model)
    begin.on_train_begin()
    take(4.0 * (1 + tfdist.rank()), 1)
    return shared(model)


def test_weighted_gradients_that_waited_are_left_out_when_all_begin_anew():
    assert run_ranks(taken_half_way, 2) == [3.0 - (4.0 + 8.0) / 2] * 2


def of_unknown_direction(folder):
    """How many steps were taken before the error."""
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    best = Checkpoint(f"{folder}/m.keras", monitor="val_gain", save_best_only=True)
    found = outcome(lambda: fit(new_model(), (1, 2, 3), count, best))
    return [found["class"], found["message"], len(steps)]


def test_a_monitor_that_may_be_either_is_an_error_on_all_ranks_at_once(tmp_path):
    for kind, message, steps in run_ranks(of_unknown_direction, 2, str(tmp_path)):
        assert kind == "ValueError"
        assert "Pass mode='max'" in message and "'val_gain'" in message
        assert steps == 1
