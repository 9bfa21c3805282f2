"""Models x optimizers x options on two ranks against one process (`matrix.py`).

8 of the 144 cells are part of `make test`, all of them of `make test-slow`.
"""

import functools
import inspect

import keras
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


@pytest.mark.parametrize("cell", matrix.quick(), ids=",".join)
def test_every_model_optimizer_and_option_equals_one_process(cell):
    muon = inspect.getsource(keras.optimizers.Muon)
    if "Muon" in cell and "momentums[variable.path]" in muon:
        pytest.skip(f"Muon of Keras {keras.__version__} does not run on TensorFlow")
    check([cell])


@pytest.mark.slow
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_every_cell_equals_one_process(option, record_property):
    cells = [cell for cell in matrix.cells() if cell[2] == option]
    record_property("largest deviation", check(cells))


def test_the_quick_cells_have_every_model_every_optimizer_and_every_option():
    chosen = matrix.quick()
    assert len(matrix.cells()) == 144
    assert len(chosen) == len(matrix.OPTIONS) == 8
    assert set(chosen) < set(matrix.cells())
    for place, all_of_it in enumerate(matrix.FACTORS):
        assert {cell[place] for cell in chosen} == set(all_of_it)


def test_what_a_step_is_expected_to_send():
    assert matrix.buckets() == 2
    assert matrix.updates("plain") == 24
    assert matrix.updates("accumulation") == 6
