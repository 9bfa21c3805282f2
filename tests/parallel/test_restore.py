"""restore: what one rank reads from a checkpoint is on all ranks, or an error is."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.gradients.accumulation import totals
from tfdist.layers.seed_generators import states_of_generators

EPOCHS, STEPS = 2, 4


def compiled(units=3, optimizer=None, noisy=False, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(10 + tfdist.rank())
    noise = [
        keras.Sequential([keras.Input((2,)), keras.layers.GaussianNoise(0.5)]),
        keras.layers.Dropout(0.5),
    ]
    model = keras.Sequential(
        [
            keras.Input((2,)),
            *(noise if noisy else []),
            keras.layers.Dense(units, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.0625, EPOCHS * STEPS)
    optimizer = optimizer or keras.optimizers.SGD(rate, momentum=0.75, **options)
    model.compile(tfdist.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    return model


def fit(model, begin, path=None):
    """Trains the epochs from `begin` on; each of its own data."""
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    if path is not None:
        callbacks.append(tfdist.callbacks.Checkpoint(path))
    for epoch in range(begin, EPOCHS):
        rng = np.random.default_rng([epoch, tfdist.rank()])
        x = rng.normal(size=(STEPS * 4, 2)).astype("float32")
        model.fit(
            x,
            x[:, :1],
            batch_size=4,
            initial_epoch=epoch,
            epochs=epoch + 1,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )


def state(model):
    kept = [*model.weights, *states_of_generators(model), *model.optimizer.variables]
    return [np.array(v) for v in kept]


def interrupted(folder, noisy=False):
    """A whole training; then one that begins with the first one's first epoch."""
    whole = compiled(noisy=noisy)
    fit(whole, 0, folder + "/step-{step:03d}.keras")
    before = state(whole)
    resumed = compiled(noisy=noisy)
    path = folder + f"/step-{STEPS:03d}.keras"
    # Only rank 0 has the file.
    step = tfdist.restore(resumed, path if tfdist.rank() == 0 else "nowhere.keras")
    fit(resumed, 1, folder + "/again-{step}.keras")
    same = [np.array_equal(a, b) for a, b in zip(before, state(resumed), strict=True)]
    return [step, all(same), len(same)]


def check_interrupted(results):
    for step, same, count in results:
        assert (step, same) == (STEPS, True)
        assert count > 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of an interrupted training on two ranks, and what it returned.

    Nobody may write into the folder.
    """
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_ranks(interrupted, 2, str(folder), True)


def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one(trained):
    check_interrupted(trained[1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_random_numbers_a_resumed_training_ends_with_the_same_bits(
    ranks, tmp_path
):
    check_interrupted(run_ranks(interrupted, ranks, str(tmp_path)))


def restored(path):
    model = compiled(noisy=True)
    step = tfdist.restore(model, path)
    return [step, *map(np.array, [*model.weights, *model.optimizer.variables])]


def test_another_number_of_ranks_goes_on_from_the_same_state(trained):
    path = str(trained[0] / f"step-{STEPS:03d}.keras")
    alone = run_ranks(restored, 1, path)[0]
    assert alone[0] == STEPS
    for own in run_ranks(restored, 3, path):
        for a, b in zip(own, alone, strict=True):
            np.testing.assert_array_equal(a, b)


def refused(path, kind):
    model = {
        "units": lambda: compiled(units=5, noisy=True),
        "optimizer": lambda: compiled(optimizer=keras.optimizers.Adam(), noisy=True),
        "slots": lambda: compiled(use_ema=True, noisy=True),
        "file": lambda: compiled(noisy=True),
        "missing": lambda: compiled(noisy=True),
    }[kind]()
    before = [np.array(v) for v in model.weights]
    result = outcome(lambda: tfdist.restore(model, path))
    assert all(map(np.array_equal, before, model.weights))
    return result


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "units",
            r"different model .*expected first/kernel of shape \(2, 5\), found .*",
        ),
        ("optimizer", "state of the optimizer SGD, but this model .* with Adam"),
        ("slots", "expected 13 variables of the optimizer, found 7 in the file"),
        ("file", "Expected an undamaged checkpoint, but .* SHA-256"),
        ("missing", "There is no checkpoint"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_on_all_ranks(
    kind, words, trained, tmp_path
):
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    path = str(tmp_path / f"step-{STEPS:03d}.keras")
    if kind == "file":
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
    if kind == "missing":
        path = str(tmp_path / "none.keras")
    results = run_ranks(refused, 2, path, kind)
    assert results[0]["class"] in ("ValueError", "FileNotFoundError")
    assert results[1]["class"] == "RankFailedError"
    for result in results:
        assert re.search(words, result["message"], re.DOTALL), result


def _restored_if_any(folder):
    return tfdist.restore(compiled(), f"{folder}/*.keras", missing_ok=True)


def test_without_a_file_a_training_begins_on_request(tmp_path):
    assert run_ranks(_restored_if_any, 2, str(tmp_path)) == [0, 0]


class Parts(keras.Model):
    """Two layers; of a class that Keras cannot make from a file."""

    def __init__(self, units, name_of_last):
        super().__init__()
        self.first = keras.layers.Dense(units)
        setattr(self, name_of_last, keras.layers.Dense(1))
        self.build((None, 2))

    def build(self, shape):
        first, last = self.layers
        first.build(shape)
        last.build((None, first.units))
        self.built = True

    def get_config(self):
        return {}


def parts(units, name_of_last):
    keras.utils.clear_session()
    keras.utils.set_random_seed(10 + tfdist.rank())
    model = Parts(units, name_of_last)
    adam = keras.optimizers.Adam(0.5, gradient_accumulation_steps=2)
    model.compile(tfdist.DistributedOptimizer(adam), "mse", jit_compile=False)
    return model


def take_weighted(model, batches):
    """Half an update for each batch."""
    variables = model.trainable_variables
    for batch in batches:
        value = 1.0 + batch + tfdist.rank()
        grads = [tf.fill(v.shape, value) for v in variables]
        model.optimizer.apply(grads, variables, weight=2 * batch + 1)


def whole_state(model):
    return state(model) + [np.array(v) for v in totals(model.optimizer)]


def refused_whole(path, units, name_of_last):
    """Both models wait for their second update, and have the sum of weights."""
    saved = parts(3, "head")
    take_weighted(saved, range(3))
    if tfdist.rank() == 0:
        saved.save(path)
    model = parts(units, name_of_last)
    take_weighted(model, [4])
    before = whole_state(model)
    result = outcome(lambda: tfdist.restore(model, path))
    after = whole_state(model)
    assert all(map(np.array_equal, before, after)), result
    return result


@pytest.mark.parametrize(
    ("units", "name_of_last", "words"),
    [
        (3, "end", r"model than 'parts', .*or attributes .*Error from Keras: "),
        (5, "head", r"no variable of shape \(2, 5\), but one of \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_not_read_in_part(units, name_of_last, words, tmp_path):
    path = str(tmp_path / "parts.keras")
    results = run_ranks(refused_whole, 2, path, units, name_of_last)
    assert [r["class"] for r in results] == ["ValueError", "RankFailedError"]
    for result in results:
        assert re.search(words, result["message"], re.DOTALL), result


def rolled_back(path):
    """Whether the update after a restore is the same half way to another update."""
    model = parts(3, "head")
    take_weighted(model, [0, 1])
    if tfdist.rank() == 0:
        model.save(path)
    found = []
    for _ in range(2):
        tfdist.restore(model, path)
        take_weighted(model, [5, 2])
        found.append(whole_state(model))
        take_weighted(model, [9])  # waits for an update, which never comes
    return [np.array_equal(a, b) for a, b in zip(*found, strict=True)]


def test_a_restore_forgets_the_weights_of_batches_that_waited(tmp_path):
    for same in run_ranks(rolled_back, 2, str(tmp_path / "parts.keras")):
        assert len(same) > 10
        assert all(same)


class Pair(keras.Model):
    """Two parts, each with an optimizer, which an attribute or a list holds."""

    def __init__(self, own, in_list, built):
        super().__init__()
        self.options = {"own": own, "in_list": in_list, "built": built}
        self.parts = [
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
            for units in (1, 3)
        ]
        made = [keras.optimizers.Adam(0.25), keras.optimizers.SGD(0.5, momentum=0.5)]
        made = list(map(tfdist.DistributedOptimizer, made))
        for one, part, is_built in zip(made, self.parts, built, strict=True):
            if is_built:
                one.build(part.trainable_variables)
        first, second = made
        self.compile(first if own else None, jit_compile=False)
        if in_list:
            self.several = [second] if own else [first, second]
        else:
            self.of_first, self.of_second = first, second
        self.made = SimpleNamespace(optimizers=made)  # Keras does not look into it

    def get_config(self):
        return dict(self.options)


def pair(own, in_list, built=(True, True)):
    keras.utils.clear_session()
    keras.utils.set_random_seed(10 + tfdist.rank())
    return Pair(own, in_list, built)


def restored_pairs(folder):
    """Rank 0 alone has the file; both optimizers have a state of rank 0."""
    found = []
    for own in (True, False):
        for in_list in (True, False):
            path = f"{folder}/{own}-{in_list}.keras"
            model = pair(own, in_list)
            slots = [v for one in model.made.optimizers for v in one.variables]
            for number, v in enumerate(slots):
                v.assign(np.full(v.shape, number + 1.0))
            expected = [np.array(v) for v in model.weights + slots]
            if tfdist.rank() == 0:
                model.save(path)
            other = pair(own, in_list)
            step = tfdist.restore(other, path)
            slots = [v for one in other.made.optimizers for v in one.variables]
            found.append([step, expected, [np.array(v) for v in other.weights + slots]])
    return found


def test_all_optimizers_of_a_model_are_restored(tmp_path):
    first, second = run_ranks(restored_pairs, 2, str(tmp_path))
    for (step, expected, values), (also, _, others) in zip(first, second, strict=True):
        assert step == also == 1
        for a, b, c in zip(expected, values, others, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


def unbuilt(path):
    """The second optimizer is not built: on all ranks; on rank 1."""
    if tfdist.rank() == 0:
        pair(True, False).save(path)
    found = []
    for is_built in (False, tfdist.rank() == 0):
        model = pair(True, False, (True, is_built))
        before = [np.array(v) for v in model.weights]
        found.append(outcome(lambda model=model: tfdist.restore(model, path)))
        assert all(map(np.array_equal, before, model.weights))
    return found


def test_an_optimizer_that_is_not_built_is_an_error_on_all_ranks(tmp_path):
    for nowhere, on_rank_0 in run_ranks(unbuilt, 2, str(tmp_path / "pair.keras")):
        assert "optimizers that are not built: SGD" in nowhere["message"]
        assert "optimizer.build(variables)" in nowhere["message"]
        assert on_rank_0["class"] == "MismatchError"
        assert "the list of built optimizers" in on_rank_0["message"]


def half(path):
    """A model that compile has given a loss scale, and one whose optimizer has it."""
    found = []
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for wraps in (lambda optimizer: optimizer, tfdist.DistributedOptimizer) * 2:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(wraps(keras.optimizers.SGD(0.5, momentum=0.5)), "mse")
            if found:
                tfdist.restore(model, path)
            else:
                model.optimizer.build(model.trainable_variables)
            found.append(float(model.optimizer.dynamic_scale))
            model.optimizer.dynamic_scale.assign(found[-1] / 2)
            model.save(path)
    finally:
        keras.config.set_dtype_policy("float32")
    return found


def test_a_loss_scale_is_restored_whoever_put_it_there(tmp_path):
    scales = [2.0**15, 2.0**14, 2.0**13, 2.0**12]
    assert run_ranks(half, 1, str(tmp_path / "half.keras")) == [scales]


class Scaled(keras.Model):
    """A model that also holds the optimizer inside its loss scale."""

    def __init__(self, attribute):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self(np.zeros((1, 2)))
        setattr(self, attribute, keras.optimizers.SGD(0.5, momentum=0.5))
        scale = keras.optimizers.LossScaleOptimizer(getattr(self, attribute))
        self.compile(tfdist.DistributedOptimizer(scale), "mse")
        self.optimizer.build(self.trainable_variables)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {}


def restored_scaled(folder):
    found = []
    for attribute in ("_sgd", "inner", "sgd"):  # Keras saves "optimizer" after "inner"
        model = Scaled(attribute)
        for number, v in enumerate(model.optimizer.variables):
            v.assign(np.full(v.shape, number + 1.0))
        path = f"{folder}/{attribute}.keras"
        model.save(path)
        other = Scaled(attribute)
        tfdist.restore(other, path)
        values = zip(model.optimizer.variables, other.optimizer.variables, strict=True)
        found.append(all(np.array_equal(a, b) for a, b in values))
    return found


def test_an_attribute_may_hold_an_optimizer_inside_another(tmp_path):
    assert run_ranks(restored_scaled, 1, str(tmp_path)) == [[True] * 3]
