"""docs/arguments.md: every argument has an effect that a test keeps."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / ".ci" / "argument_docs.py"
SPEC = importlib.util.spec_from_file_location("argument_docs", PATH)
argument_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(argument_docs)


def test_every_argument_has_a_row_and_every_test_exists():
    assert argument_docs.problems(argument_docs.load()) == []


def test_every_callback_has_a_section():
    import tfdist

    named = {section["of"] for section in argument_docs.load().values()}
    callbacks = {f"tfdist.callbacks.{name}" for name in tfdist.callbacks.__all__}
    assert callbacks <= named


def test_the_committed_page_is_current():
    text = argument_docs.render(argument_docs.load())
    assert argument_docs.PAGE.read_text(encoding="utf-8") == text, "run: make docs"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows.pop("seed"), "no row for seed"),
        (
            lambda rows: rows.update(other=["x", rows["seed"][1]]),
            "other is not an argument",
        ),
        (
            lambda rows: rows.update(seed=[" ", rows["seed"][1]]),
            "seed has an empty cell",
        ),
        (lambda rows: rows.update(seed=["x"]), "seed has an empty cell"),
        (
            lambda rows: rows.update(seed=["x", "single/test_data.py::test_none"]),
            "there is no test single/test_data.py::test_none",
        ),
        (
            lambda rows: rows.update(seed=["x", "single/test_none.py::test_x"]),
            "there is no test single/test_none.py::test_x",
        ),
    ],
)
def test_what_is_missing_in_the_table_is_named(change, expected):
    title = "tfdist.data.shard"
    section = argument_docs.load()[title]
    change(section["rows"])
    [problem] = argument_docs.problems({title: section})
    assert problem.startswith("tfdist.data.shard: ") and expected in problem
