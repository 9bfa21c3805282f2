"""docs/api.md has every public name, with the first line of its docstring."""

import importlib.util

from helpers.tree import ROOT

SPEC = importlib.util.spec_from_file_location("api_docs", ROOT / ".ci" / "api_docs.py")
api_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(api_docs)


def test_the_committed_page_is_current():
    assert api_docs.PAGE.read_text(encoding="utf-8") == api_docs.render(), (
        "run: make docs"
    )


def test_every_name_has_a_summary():
    rows = [x for x in api_docs.render().splitlines() if x.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


def test_check_says_how_to_repair_a_stale_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "api.md"
    page.write_text("old")
    monkeypatch.setattr(api_docs, "PAGE", page)
    assert api_docs.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert page.read_text() == "old"
