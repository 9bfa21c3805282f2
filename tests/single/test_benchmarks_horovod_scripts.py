"""How losses of the same scripts under Horovod and tfdist are compared."""

import math
from pathlib import Path

import pytest

from benchmarks.horovod_scripts import curves
from benchmarks.horovod_scripts.curves import Case

SCRIPTS = Path(__file__).resolve().parents[1] / "integration" / "horovod_scripts"
CASE = Case("mnist_fit", tolerance=0.01)


def test_the_difference_is_a_share_of_the_largest_loss_of_all_ranks():
    ours, theirs = [[2.0, 1.0], [4.0, 0.5]], [[2.0, 1.0], [4.0, 0.6]]
    assert curves.difference(ours, theirs) == pytest.approx(0.1 / 4)
    assert curves.difference(theirs, theirs) == 0.0
    assert curves.difference([[0.0]], [[0.0]]) == 0.0


def test_the_tolerance_is_the_largest_difference_that_is_still_the_same():
    result = curves.compared(CASE, [[1.0, 0.5]] * 2, [[1.0, 0.509]] * 2)
    assert (result.verdict, result.losses) == (curves.SAME, 4)
    assert curves.compared(CASE, [[1.0]], [[0.98]]).verdict == curves.DIFFERS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_differs_also_from_itself(bad):
    result = curves.compared(CASE, [[1.0, bad]], [[1.0, bad]])
    assert result.verdict == curves.DIFFERS


@pytest.mark.parametrize("theirs", [[[1.0]], [[1.0, 0.5, 0.2]], [[1.0, 0.5]] * 2])
def test_curves_of_other_lengths_are_a_failure_that_names_both(theirs):
    result = curves.compared(CASE, [[1.0, 0.5]], theirs)
    assert result.verdict == curves.FAILED
    assert "got [2] with tfdist" in result.reason
    assert str([len(rank) for rank in theirs]) in result.reason


def test_no_losses_at_all_are_a_failure():
    assert curves.compared(CASE, [[], []], [[], []]).verdict == curves.FAILED


def test_the_table_has_all_scripts_and_says_below_it_why_one_has_failed():
    good = curves.compared(CASE, [[1.0]], [[1.0]])
    text = curves.report([good, curves.failed(CASE, "under hvd-gloo: exit code 1")])
    lines = text.splitlines()
    assert lines[2] == "| mnist_fit | 1 | 0.0e+00 | 1e-02 | same |  |"
    assert lines[3] == "| mnist_fit | - | - | 1e-02 | failed |  |"
    assert lines[-1] == "mnist_fit: under hvd-gloo: exit code 1"


def test_every_script_that_trains_is_compared():
    # Those named elastic_... lose a rank on the way.
    paths = [path for path in SCRIPTS.glob("*.py") if "elastic" not in path.stem]
    scripts = {path.stem for path in paths if "report.write(" in path.read_text()}
    assert {case.name for case in curves.CASES} == scripts
    assert curves.chosen("all") == list(curves.CASES)


def test_unknown_scripts_are_refused_with_the_list_of_those_there_are():
    assert [case.name for case in curves.chosen("gan,mnist_fit")] == [
        "gan",
        "mnist_fit",
    ]
    with pytest.raises(ValueError, match="Expected scripts of mnist_fit, .*; got gnn"):
        curves.chosen("gnn")
