"""docs/sharding-a-pipeline.md: its lines run on two ranks, which share the samples."""

import numpy as np
from helpers.pages import run_page
from helpers.ranks import run_ranks

PIPELINES = ("sharded", "sharded_cached", "cached", "train", "windows", "pictures")


def page():
    names = run_page("sharding-a-pipeline.md")
    seen = {
        name: [y.tolist() for _, y in names[name].as_numpy_iterator()]
        for name in PIPELINES
    }
    squares = names["squares"]
    seen["squares"] = [squares[i][0].tolist() for i in range(len(squares))]
    kernel = names["model"].trainable_variables[0].numpy()
    return seen, names["model"].history.history["loss"], kernel


def test_the_ranks_have_different_samples_and_equal_steps():
    (first, loss, kernel), (second, other_loss, other) = run_ranks(page, 2, init=False)
    for name in (*PIPELINES, "squares"):
        assert len(first[name]) == len(second[name]), name
    for name in ("sharded", "sharded_cached", "cached", "squares"):
        samples = sum(first[name] + second[name], [])
        assert sorted(samples) == list(range(44)), name
    assert sorted(sum(first["windows"] + second["windows"], [])) == list(range(5, 96))
    assert sum(sum(first["pictures"] + second["pictures"], [])) == 10
    assert sum(map(len, first["train"] + second["train"])) == 16
    assert loss == other_loss
    assert np.array_equal(kernel, other)
