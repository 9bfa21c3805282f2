"""docs/config.md is what the table in the core says."""

from tfdist.core import native
from tfdist.tools import config_docs


def test_the_committed_page_is_current():
    text = config_docs.render(native.config().values())
    assert config_docs.PAGE.read_text(encoding="utf-8") == text, "run: make docs"


def test_the_page_does_not_depend_on_the_environment(monkeypatch):
    before = config_docs.render(native.config().values())
    monkeypatch.setenv("TFDIST_TIMEOUT_S", "7")
    assert native.value("TFDIST_TIMEOUT_S") == 7
    assert config_docs.render(native.config().values()) == before


def test_every_variable_has_one_line_with_default_and_meaning():
    text = config_docs.render(native.config().values())
    for name, row in native.config().items():
        lines = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(lines) == 1
        assert lines[0].endswith(f"| {row['help']} |")
        assert row["help"]


def test_check_says_how_to_repair_a_stale_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "config.md"
    page.write_text("old")
    monkeypatch.setattr(config_docs, "PAGE", page)
    assert config_docs.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert page.read_text() == "old"
    assert config_docs.main([]) == 0
    assert config_docs.main(["--check"]) == 0
