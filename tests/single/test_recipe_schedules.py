"""The presets of recipes/schedules.py: their optimizers do what their formulas say."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.optimizers import sgd_share

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # the modules of the folder import each other
SPEC = importlib.util.spec_from_file_location("schedules", RECIPES / "schedules.py")
recipe = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = recipe  # where dataclasses look for it
SPEC.loader.exec_module(recipe)

SETTING = {"steps_per_epoch": 3, "global_batch": 1024}
VARIANTS = {
    **recipe.PRESETS,
    "exponential": dataclasses.replace(
        recipe.PRESETS["goyal_2017"], decay=recipe.Exponential(0.94, 2)
    ),
    "short, fractions": dataclasses.replace(
        recipe.PRESETS["goyal_2017"],
        epochs=7.5,
        warmup_epochs=0.5,
        decay=recipe.Steps((2.5, 5.1), 0.5),
    ),
    **{
        f"goyal_2017 in 9 epochs, {decay}": recipe.changed(
            "goyal_2017", epochs=9, decay=decay
        )
        for decay in (None, *recipe.DECAYS)
    },
    "lars, changed": recipe.changed("lars_16k", epochs=7, rate=2.0, warmup_epochs=3),
}


def steps_of(preset):
    return range(round(preset.epochs * SETTING["steps_per_epoch"]) + 2)


# Long trainings are slow where each operation is called by itself.
SLOW = {
    (name, False): pytest.mark.slow
    for name, preset in VARIANTS.items()
    if preset.epochs > 10
}


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        pytest.param(name, graph, marks=SLOW.get((name, graph), ()))
        for graph in (False, True)
        for name in VARIANTS
    ],
)
def test_the_schedule_equals_the_closed_form_at_every_step(name, graph):
    preset = VARIANTS[name]
    schedule = recipe.schedule(preset, **SETTING)
    steps = steps_of(preset)
    if graph:
        inputs = [tf.TensorSpec([], tf.int64)]
        call = tf.function(schedule, input_signature=inputs, autograph=False)
        found = [float(call(tf.constant(s, tf.int64))) for s in steps]
    else:
        found = [float(schedule(tf.constant(s, tf.int64))) for s in steps]
    expected = [recipe.rate_at(preset, s, **SETTING) for s in steps]
    peak = max(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7 * peak)


@pytest.mark.parametrize("name", VARIANTS)
def test_rate_and_momentum_of_the_optimizer_at_every_step(name):
    preset = VARIANTS[name]
    optimizer = recipe.optimizer(preset, **SETTING)
    w = keras.Variable([[1.0, 0.5]], dtype="float64")
    optimizer.build([w])
    gradients = tf.Variable(tf.zeros([1, 2], tf.float64))

    @tf.function
    def apply():
        rate = tf.identity(optimizer.learning_rate)
        optimizer.apply([gradients], [w])
        return rate

    def local(g, w):
        if isinstance(optimizer, recipe.LARS):
            size, slope = np.linalg.norm(w), np.linalg.norm(g)
            return 0.001 * size / (slope + 1e-4 * size)
        if isinstance(optimizer, recipe.RMSpropWarmup):
            share = sgd_share(step / SETTING["steps_per_epoch"], 10, 5)
            squares[:] = 0.99 * squares + 0.01 * (g + 1e-4 * w) ** 2
            return share + (1 - share) * 3e-4 / rate / (np.sqrt(squares) + 1e-8)
        return 1.0

    rng = np.random.default_rng(1)
    at, v, squares = np.array([[1.0, 0.5]]), np.zeros((1, 2)), np.zeros((1, 2))
    for step in list(steps_of(preset))[:-2]:
        g = rng.normal(size=(1, 2))
        gradients.assign(g)
        rate = recipe.rate_at(preset, step, **SETTING)
        momentum = recipe.momentum_at(preset, step, **SETTING)
        update = rate * local(g, at) * (g + 1e-4 * at)
        v = momentum * v + update
        at = at - (preset.momentum * v + update if preset.nesterov else v)
        np.testing.assert_allclose(float(apply()), rate, rtol=2e-6, atol=1e-5)
        np.testing.assert_allclose(w.numpy(), at, rtol=1e-5, atol=1e-5)


def test_goyal_2017_has_the_numbers_of_the_paper():
    preset = recipe.PRESETS["goyal_2017"]
    setting = {"steps_per_epoch": 10, "global_batch": 8192}
    rates = {e: recipe.rate_at(preset, e * 10, **setting) for e in range(90)}
    assert rates[0] == pytest.approx(0.1)
    assert rates[5] == rates[29] == pytest.approx(3.2)
    assert rates[30] == rates[59] == pytest.approx(0.32)
    assert rates[60] == rates[79] == pytest.approx(0.032)
    assert rates[80] == rates[89] == pytest.approx(0.0032)
    assert recipe.rate_at(preset, 25, **setting) == pytest.approx(1.65)
    assert recipe.momentum_at(preset, 300, **setting) == pytest.approx(0.09)
    assert recipe.momentum_at(preset, 301, **setting) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("name", "global_batch", "peak", "last_epoch_of_warmup"),
    [
        ("cosine_2018", 1024, 0.4, 5),
        ("lars_16k", 16384, 25.0, 5),
        ("lars_32k", 32768, 34.0, 12),
        ("lars_64k", 65536, 41.0, 16),
    ],
)
def test_the_others_rise_from_0_to_the_published_rate(
    name, global_batch, peak, last_epoch_of_warmup
):
    setting = {"steps_per_epoch": 10, "global_batch": global_batch}
    preset = recipe.PRESETS[name]
    steps = range(round(preset.epochs * 10))
    rates = [recipe.rate_at(preset, s, **setting) for s in steps]
    assert rates[0] == 0.0
    assert max(rates) == rates[last_epoch_of_warmup * 10] == pytest.approx(peak)


def test_akiba_2017_starts_slowly_and_has_no_warmup_of_the_rate():
    preset = recipe.PRESETS["akiba_2017"]
    setting = {"steps_per_epoch": 10, "global_batch": 32768}
    rates = {e: recipe.rate_at(preset, e * 10, **setting) for e in range(90)}
    assert rates[0] == rates[39] == pytest.approx(6.4)
    assert rates[40] == rates[69] == pytest.approx(0.96)
    assert rates[70] == rates[84] == pytest.approx(0.128)
    assert rates[85] == rates[89] == pytest.approx(0.0128)
    shorter = recipe.changed("akiba_2017", epochs=9)
    assert shorter.transition_epochs == (1.0, 0.5)
    assert shorter.decay.epochs == (0, 4, 7, 8.5)
    optimizer = recipe.optimizer(shorter, **setting, accumulation=2)
    assert (optimizer.center_steps, optimizer.period_steps) == (20, 10)


def test_a_preset_is_stretched_as_a_whole():
    preset = recipe.changed("goyal_2017", epochs=9)
    assert (preset.epochs, preset.warmup_epochs) == (9, 0.5)
    assert preset.decay == recipe.Steps((3, 6, 8), 0.1)
    assert recipe.changed("goyal_2017") == recipe.PRESETS["goyal_2017"]
    assert recipe.changed("cosine_2018", warmup_epochs=0).warmup_epochs == 0
    assert recipe.changed("cosine_2018", rate=0.2).rate == 0.2
    exponential = recipe.changed("cosine_2018", epochs=45, decay="exponential")
    assert exponential.decay == recipe.Exponential(0.94, 1.0)


def test_a_batch_that_has_not_grown_is_not_warmed_up():
    preset = recipe.PRESETS["goyal_2017"]
    setting = {"steps_per_epoch": 10, "global_batch": 64}
    assert {recipe.rate_at(preset, s, **setting) for s in range(300)} == {0.025}


def test_more_warm_up_than_epochs_is_refused():
    preset = dataclasses.replace(recipe.PRESETS["lars_32k"], epochs=12)
    with pytest.raises(ValueError, match="more epochs than the 12 of the warm-up"):
        recipe.rate_at(preset, 0, **SETTING)


def test_the_table_is_printed(capsys):
    recipe.main(["lars_32k", "32768"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 91
    assert re.fullmatch(r" +12  34", lines[13])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: preset, global_batch"),
        (["goyal", "256"], "invalid choice: 'goyal'.*goyal_2017"),
        (["goyal_2017", "many"], "global_batch: invalid int value: 'many'"),
        (["goyal_2017", "0"], "of 1 to 1281167 .*, got 0"),
        (["goyal_2017", "9999999"], "of 1 to 1281167 .*, got 9999999"),
    ],
)
def test_a_table_that_cannot_be_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        recipe.main(words)
    assert re.search(message, capsys.readouterr().err)


def test_the_largest_batch_has_a_table(capsys):
    recipe.main(["lars_64k", "1281167"])
    assert " 1 in an epoch" in capsys.readouterr().out


def test_accumulated_batches_have_the_rate_of_their_update():
    preset = recipe.PRESETS["goyal_2017"]
    optimizer = recipe.optimizer(preset, **SETTING, accumulation=4)
    w = keras.Variable([1.0])
    optimizer.build([w])
    for step in (0, 1, 5, 29, 89, 90, 91):
        expected = recipe.rate_at(preset, step, **SETTING)
        for batch in range(4):
            optimizer._iterations.assign(step * 4 + batch)
            np.testing.assert_allclose(optimizer.learning_rate, expected, rtol=2e-6)
    copy = type(optimizer).from_config(optimizer.get_config())
    copy._iterations.assign(23)
    expected = recipe.rate_at(preset, 5, **SETTING)
    np.testing.assert_allclose(copy.learning_rate, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        ("goyal_2017", 8192, "rate 3.2 = 0.1 x 8192 / 256, warm-up from 0.1 in 5 ep"),
        ("cosine_2018", 256, "rate 0.1 = 0.1 x 256 / 256, warm-up from 0 in 5 epochs"),
        (
            "akiba_2017",
            32768,
            "rate 12.8 = 0.1 x 32768 / 256, RMSprop until epoch 12.5",
        ),
        ("lars_32k", 32768, "rate 34, warm-up from 0 in 12 epochs"),
        ("goyal_2017", 64, "rate 0.025 = 0.1 x 64 / 256, momentum correction"),
    ],
)
def test_the_rule_of_a_preset_is_one_line(name, batch, words):
    line = recipe.rule(recipe.PRESETS[name], batch)
    assert line.startswith(words)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "batch", "advice"),
    [
        (
            "goyal_2017",
            16384,
            "Use --preset=akiba_2017 or lars_16k or lars_32k or lars",
        ),
        ("lars_16k", 40000, "Use --preset=lars_64k."),
        ("lars_64k", 100_000, "Use a smaller one."),
    ],
)
def test_a_batch_above_that_of_the_publication_is_a_warning(name, batch, advice):
    warning = recipe.rule(recipe.PRESETS[name], batch).split("\n")[1]
    assert warning.startswith("warning: accuracy may be lost")
    assert f"this one has {batch}. {advice}" in warning
