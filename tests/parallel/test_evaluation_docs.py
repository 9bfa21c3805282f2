"""The lines of docs/evaluation.md run on two ranks, one after the other."""

import numpy as np
from helpers.pages import run_page
from helpers.ranks import run_ranks


def page():
    names = run_page("evaluation.md")
    kernel = names["model"].trainable_variables[0].numpy()
    return [names["results"], names["outputs"], names["indices"], kernel]


def test_the_lines_of_the_page_run_and_the_ranks_have_the_same():
    first, second = run_ranks(page, 2, init=False)
    assert sorted(first[0]) == ["accuracy", "auc", "loss"]
    assert first[0] == second[0]
    assert np.array_equal(first[1], second[1]) and first[1].shape == (100, 1)
    assert sorted([*first[2], *second[2]]) == list(range(100))
    assert np.array_equal(first[3], second[3])
