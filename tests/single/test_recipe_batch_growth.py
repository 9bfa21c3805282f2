"""The growing batches of the recipe: their stages, and the rates of each step."""

import importlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from absl import flags
from helpers import recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # the modules of the folder import each other
batch_growth = importlib.import_module("batch_growth")
schedules = importlib.import_module("schedules")

EXAMPLES, FIRST = 960, 32


def rates(name, text, *, epochs=9, accumulation=1):
    """The rates of all steps: of the optimizer's schedule, and in closed form."""
    preset = schedules.changed(name, epochs=epochs)
    batches = batch_growth.parse(text, FIRST)
    growth = batch_growth.Growth(
        batches, EXAMPLES, scales_rate=preset.batch is not None
    )
    steps = range(batches.steps_before(epochs, total=EXAMPLES))
    numbers = {"steps_per_epoch": EXAMPLES // FIRST, "global_batch": FIRST}
    optimizer = schedules.optimizer(
        preset, growth=growth, accumulation=accumulation, **numbers
    )
    schedule = optimizer._learning_rate
    config = keras.optimizers.schedules.serialize(schedule)
    again = keras.optimizers.schedules.deserialize(config)
    found = [float(schedule(step * accumulation)) for step in steps]
    assert [float(again(step * accumulation)) for step in steps] == found
    closed = []
    for step in steps:
        place, factor = growth.place_of(step)
        closed.append(factor * schedules.rate_at(preset, place, **numbers))
    return batches, np.array(found), np.array(closed)


@pytest.mark.parametrize("name", ["goyal_2017", "cosine_2018", "lars_16k"])
def test_the_schedule_is_the_closed_form(name):
    _, found, closed = rates(name, "3:96,6:320", accumulation=2)
    np.testing.assert_allclose(found, closed, rtol=1e-5, atol=1e-8)


def test_a_batch_that_grows_where_the_rate_falls_keeps_the_rate():
    batches, found, _ = rates("goyal_2017", "3:320,6:960")  # a tenth at 3, 6 and 8
    begins = [batches.steps_before(e, total=EXAMPLES) for e in (3, 6, 8)]
    np.testing.assert_allclose(found[begins[0] : begins[1]], found[begins[0] - 1])
    np.testing.assert_allclose(found[begins[1]] / found[begins[0]], 0.3, rtol=1e-5)
    np.testing.assert_allclose(found[-1] / found[begins[1]], 0.1, rtol=1e-5)


def test_rates_that_are_not_scaled_follow_the_epochs_alone():
    batches, found, _ = rates("lars_16k", "3:96")
    _, plain, _ = rates("lars_16k", "")
    begin = batches.steps_before(3, total=EXAMPLES)
    np.testing.assert_allclose(found[begin:], plain[begin::3], rtol=1e-6)


def test_without_growth_the_schedule_is_unchanged():
    growth = batch_growth.Growth(batch_growth.parse("", 8), 80, scales_rate=True)
    plain = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert growth.of(plain) is plain


@pytest.mark.parametrize(
    "text",
    ["30", "30:", "0:64", "-1:64", "a:64", "3:64;4:128", "3:16", "3:64,3:96", "²:64"],
)
def test_a_text_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="Expected --batch_growth=EPOCH:BATCH"):
        batch_growth.parse(text, 32)


@pytest.mark.parametrize("text", ["1:64", "0:128,1:64", "0:32,1:48", "0:64,x:64"])
def test_image_sizes_have_to_grow_to_the_last_one(text):
    with pytest.raises(ValueError, match="sizes that grow to --image_size=64"):
        batch_growth.parse_sizes(text, 64)
    assert batch_growth.parse_sizes("", 64) == {0: 64}


@pytest.mark.parametrize(
    ("ranks", "batch", "words"),
    [
        (3, 1002, "batch of 1002 .* got 1000. Use 999 or less in --global_batch"),
        (3, 998, "got 998. Use 996 or 999 in"),
        (3, 1001, "got 1001. Use 999 in"),
        (3, 0, "got 0. Use 3 or 6 in"),
        (1001, 1001, "Expected at least 1001 .*got 1000. Start at most 1000 ranks"),
        (1001, 1000, "Start at most 1000 ranks"),
    ],
)
def test_sizes_that_are_suggested_fit_the_pictures(ranks, batch, words, monkeypatch):
    module = recipe.script()
    flags.FLAGS(["resnet50_imagenet.py"])
    monkeypatch.setattr(module.tfdist, "size", lambda: ranks)
    with pytest.raises(ValueError, match=words):
        module.check_batch("global_batch", batch, 1000)
