"""The lines of docs/evaluation.md run one after the other."""

import re
from pathlib import Path

import keras
from helpers.pages import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_all_lines_of_the_page_run():
    keras.utils.clear_session()
    names = run_page("evaluation.md")
    assert names["outputs"].shape == (100, 1)
    assert sorted(names["results"]) == ["accuracy", "auc", "loss"]
    history = names["model"].history.history
    assert history["val_count"] == [30.0]
    assert 0 < history["highest"][0] <= 1


def test_links_are_there():
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (PAGE.parent / link).is_file(), link
