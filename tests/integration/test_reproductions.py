"""The reproductions: they train, keep what is done, judge it, and write a report."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "reproductions"
NAMES = ("digits", "networks", "training", "study", "report", "warmup", "run")
STUDIES = ("linear_scaling", "warmup", "rmsprop_warmup")


@pytest.fixture
def modules(monkeypatch):
    """The modules of the folder, which import each other by their short names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in (*NAMES, *STUDIES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in (*NAMES, *STUDIES):
        sys.modules.pop(name, None)


def test_a_warmup_makes_a_large_batch_trainable(modules, tmp_path):
    study, warmup = modules["study"], modules["warmup"].STUDY
    result = study.run(warmup, seeds=1, with_ranks=False, folder=tmp_path)
    last = study.last_of(result.curves)
    assert set(last) == {"1 rank", "11 ranks, no warm-up", "11 ranks, warm-up"}
    assert last["1 rank"].mean > 0.95
    assert last["11 ranks, warm-up"].mean > last["11 ranks, no warm-up"].mean + 0.1
    page = modules["report"].page([(warmup, result)])
    assert warmup.source in page and page.count("data:image/png;base64,") == 1


def test_what_has_been_run_is_kept_until_the_code_changes(
    modules, monkeypatch, tmp_path
):
    study = modules["study"]
    trained = []

    def simulate(setting, seed):
        trained.append((setting.ranks, seed))
        return [0.5, 0.75 + seed / 100]

    monkeypatch.setattr(modules["training"], "simulate", simulate)
    one = modules["run"].STUDIES[0]

    def run(seeds):
        trained.clear()
        result = study.run(
            one, seeds=seeds, with_ranks=False, folder=tmp_path, say=lambda line: None
        )
        assert all(len(curves) == seeds for curves in result.curves.values())
        return list(trained)

    assert run(2) == [(1, 0), (1, 1), (11, 0), (11, 1), (11, 0), (11, 1)]
    assert run(2) == run(1) == []
    assert run(3) == [(1, 2), (11, 2), (11, 2)]
    monkeypatch.setattr(study, "code_hash", lambda study: "changed")
    assert len(run(1)) == 3


def test_the_interval_is_students(modules):
    found = modules["study"].interval([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_a_mark_that_does_not_hold_is_reported(modules):
    study, one = modules["study"], modules["warmup"].STUDY
    curves = {label: [[0.1, 0.85]] for label in one.settings}
    result = study.Result(curves, on_ranks=[0.82])
    checks = study.checks_of(one, result)
    assert [check.holds for check in checks] == [False, False, False]
    assert study.as_text(one, result).count("DOES NOT HOLD") == 3
    page = modules["report"].page([(one, result)])
    assert page.count("does not hold") == 3 and "real ranks" in page


def test_every_study_is_run(modules):
    scripts = {one.name for one in modules["run"].STUDIES}
    assert scripts == {
        file.stem
        for file in FOLDER.glob("*.py")
        if "STUDY = Study(" in file.read_text()
    }
    for name in scripts:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_a_study_is_confirmed_by_real_ranks(modules, monkeypatch, tmp_path):
    """With 11 ranks, as many as it simulates."""
    study = modules["study"]
    one = dataclasses.replace(
        modules["warmup"].STUDY,
        settings={
            "11 ranks, warm-up": modules["warmup"].STUDY.settings["11 ranks, warm-up"]
        },
    )
    result = study.run(one, seeds=1, folder=tmp_path)
    assert len(result.on_ranks) == 14
    simulated = result.curves["11 ranks, warm-up"][0][-1]
    assert result.on_ranks[-1] == pytest.approx(simulated, abs=0.05)


@pytest.mark.slow
def test_the_command_runs_all_of_them(tmp_path):
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "report: " in done.stdout, done.stdout + done.stderr
