"""The guides run on several ranks, and see a rank whose weights differ."""

import contextlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import launcher
from helpers.pages import cells_of, run_cell, run_guide
from helpers.ranks import run_ranks

import tfdist

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("custom_loop", "evaluation", "fit", "gan")
TIMEOUT_S = 100.0
PROGRAM_TIMEOUT_S = 300.0  # three ranks that share two cores with others


def closing_cell(guide):
    """The cell that compares the weights of the ranks."""
    [text] = [t for kind, t in cells_of(guide) if kind == "code" and "hashes =" in t]
    return text


def run_and_break(guide):
    """Runs the guide on this rank, then its last comparison with one bit changed.

    Returns:
        What the guide printed, and what the comparison raised.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run_guide(guide)
    if tfdist.rank() == 1:
        kernel = names["model"].trainable_variables[0]
        bits = kernel.numpy()
        bits.flat[0] = np.nextafter(bits.flat[0], np.float32(9))
        kernel.assign(bits)
    try:
        run_cell(guide, closing_cell(guide), names)
    except AssertionError as error:
        return [printed.getvalue(), str(error)]
    return [printed.getvalue(), ""]


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_holds_on_two_ranks_and_sees_a_bit_that_differs(guide):
    (printed, seen), (silent, seen_there) = run_ranks(
        run_and_break, 2, guide, timeout_s=TIMEOUT_S, init=False
    )
    assert printed.splitlines()[-1].startswith("same weights on 2 ranks: ")
    assert silent == ""  # one rank speaks for all
    assert seen.startswith("the ranks' weights differ: [")
    assert seen_there == seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "ranks"), [("fit", 2), *((guide, n) for guide in GUIDES for n in (1, 3))]
)
def test_a_guide_runs_as_a_program(guide, ranks, tmp_path):
    path = str(ROOT / "docs" / "guides" / f"{guide}.py")
    done = launcher.run(
        tmp_path,
        *("-np", str(ranks), sys.executable, path),
        timeout_s=PROGRAM_TIMEOUT_S,
        TF_CPP_MIN_LOG_LEVEL="2",
        TFDIST_TIMEOUT_S="60",
    )
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    if ranks > 1:  # one rank speaks for all
        assert {line[:9] for line in lines} == {"[rank 0] "}
    last = lines[-1].removeprefix("[rank 0] ")
    assert last.startswith(f"same weights on {ranks} ranks: ")
