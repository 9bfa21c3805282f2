"""The reproductions: they train, keep what is done, judge it, and write a report."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "reproductions"
STUDIES = sorted(
    f.stem for f in FOLDER.glob("*.py") if "STUDY = Study(" in f.read_text()
)
NAMES = ("digits", "networks", "training", "study", "report", "run", *STUDIES)
SMALL, WITHOUT, WITH = "1 rank", "11 ranks, no warm-up", "11 ranks, warm-up"


@pytest.fixture
def modules(monkeypatch):
    """The modules of the folder, which import each other by their short names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def quick(modules, name, folder, **options):
    """The result of a study with one seed, and of its mark."""
    one = modules[name].STUDY
    options = {"seeds": 1, "with_ranks": False, "folder": folder, **options}
    result = modules["study"].run(one, **options)
    return one, result, modules["study"].checks_of(one, result)


@pytest.mark.slow
def test_a_warmup_makes_a_large_batch_trainable(modules, tmp_path):
    one, result, _ = quick(modules, "warmup", tmp_path)
    last = modules["study"].last_of(result.curves)
    assert last[SMALL].mean > 95
    assert last[WITH].mean > last[WITHOUT].mean + 10
    page = modules["report"].page([(one, result)])
    assert one.source in page and page.count("data:image/png;base64,") == 1


@pytest.mark.parametrize(
    "name",
    [
        "unequal_batches",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in STUDIES
            if name not in ("unequal_batches", "warmup")
        ),
    ],
)
def test_the_marks_hold_for_one_seed(name, modules, tmp_path):
    _, _, checks = quick(modules, name, tmp_path)
    assert checks and all(check.holds for check in checks), checks


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("name", [one for one in STUDIES if one != "rmsprop_warmup"])
def test_the_marks_hold_for_real_ranks(name, modules, tmp_path):
    """All but the one with 22 ranks."""
    _, result, checks = quick(modules, name, tmp_path, with_ranks=True)
    assert result.on_ranks
    real = [check for check in checks if check.is_of_ranks]
    assert real and all(check.holds for check in real), checks


def test_what_has_been_run_is_kept_until_the_code_changes(
    modules, monkeypatch, tmp_path
):
    study = modules["study"]
    called = []

    def run(seeds):
        called.clear()
        result = study.run(
            one, seeds=seeds, with_ranks=False, folder=tmp_path, log=lambda line: None
        )
        assert all(len(curves) == seeds for curves in result.curves.values())
        return list(called)

    def function(name):
        return lambda seed: called.append((name, seed)) or [0.5, 0.75 + seed]

    one = dataclasses.replace(
        modules["warmup"].STUDY, runs={name: function(name) for name in "ab"}
    )
    assert run(2) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert run(2) == run(1) == []
    assert run(3) == [("a", 2), ("b", 2)]
    monkeypatch.setattr(study, "code_hash", lambda study: "changed")
    assert len(run(1)) == 2


def test_the_interval_is_students(modules):
    found = modules["study"].interval([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_a_mark_that_does_not_hold_is_reported(modules):
    study, one = modules["study"], modules["warmup"].STUDY
    curves = {name: [[10.0, 85.0]] for name in one.runs}
    result = study.Result(curves, on_ranks={"accuracy": 82.0})
    checks = study.checks_of(one, result)
    assert [check.holds for check in checks] == [False, False, False]
    assert study.as_text(one, result).count("DOES NOT HOLD") == 3
    page = modules["report"].page([(one, result)])
    assert page.count("does not hold") == 3 and "11 real ranks: accuracy" in page


def test_every_study_is_run_and_short(modules):
    assert sorted(one.name for one in modules["run"].STUDIES) == STUDIES
    for name in STUDIES:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 150
