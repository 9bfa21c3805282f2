"""Models x optimizers x options on two ranks against one process (`matrix.py`).

A pairwise sample, in which every two values of different factors meet, is part of
`make test`; all 144 cells of `make test-slow`.
"""

import functools
import itertools

import pytest
from helpers.ranks import run_ranks
from parallel import matrix

SIZE = 2
# The largest difference of a weight or slot, relative to the largest element of its
# array, and of an epoch's loss. In float32: two partial sums of half a batch round
# otherwise than one sum, by 6e-8, in every step; optimizers that divide by the size of
# a gradient enlarge that where it is nearly zero. Under float16 gradients have 11 bits
# (5e-4), and momentum adds their errors up.
TOLERANCE = dict.fromkeys(matrix.OPTIONS, 5e-5) | {"mixed_float16": 5e-3}


@functools.cache
def alone(optimizer, option):
    """One process. A reference for all models: they are the same function."""
    return matrix.train(("functional", optimizer, option), alone=True)


def check(chosen):
    """Trains cells on the ranks; returns the largest deviation."""
    env = {name: str(value) for name, value in matrix.BUCKETS.items()}
    lists = [list(cell) for cell in chosen]
    ranks = run_ranks(matrix.train_all, SIZE, lists, timeout_s=1100, env=env)
    largest = 0.0
    for cell, first, *others in zip(chosen, *ranks, strict=True):
        _, optimizer, option = cell
        for other in others:
            assert other["losses"] == first["losses"], cell
            for a, b in zip(first["state"], other["state"], strict=True):
                assert a.tobytes() == b.tobytes(), f"{cell}: the ranks differ"
        reductions = matrix.updates(option) * matrix.buckets()
        assert [r["reductions"] for r in (first, *others)] == [reductions] * SIZE, cell
        reference = alone(optimizer, matrix.same_result(option))
        for result in (first, reference):
            assert result["losses"][-1] < result["losses"][0], cell
        pairs = [(first["losses"], reference["losses"])]
        pairs += zip(first["state"], reference["state"], strict=True)
        for found, expected in pairs:
            error = matrix.deviation(found, expected)
            assert error <= TOLERANCE[option], f"{cell}: {error:.1e}"
            largest = max(largest, error)
    return largest


@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_a_sample_with_every_pair_equals_one_process(option):
    sample = matrix.pairwise(matrix.FACTORS)
    check([cell for cell in sample if cell[2] == option])


@pytest.mark.slow
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_every_cell_equals_one_process(option, record_property):
    cells = [cell for cell in matrix.cells() if cell[2] == option]
    record_property("largest deviation", check(cells))


def test_the_sample_has_every_pair_and_no_cell_twice():
    sample = matrix.pairwise(matrix.FACTORS)
    assert len(matrix.cells()) == 144
    assert set(sample) < set(matrix.cells())
    assert 24 <= len(sample) == len(set(sample)) < 60
    for (i, a), (j, b) in itertools.combinations(enumerate(matrix.FACTORS), 2):
        met = {(cell[i], cell[j]) for cell in sample}
        assert met == set(itertools.product(a, b))


def test_pairwise_of_two_factors_is_their_product():
    assert matrix.pairwise([("a", "b"), ("x", "y")]) == [
        *(("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"))
    ]


def test_what_a_step_is_expected_to_send():
    assert matrix.buckets() == 2
    assert matrix.updates("plain") == 24
    assert matrix.updates("accumulation") == 6
