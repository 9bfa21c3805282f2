"""The guides have the form of keras.io's, and what they mention is there."""

import ast
import re
from pathlib import Path

import pytest
from helpers.pages import cells_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "guides"
GUIDES = sorted(path.stem for path in FOLDER.glob("*.py"))
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def source_of(guide):
    return (FOLDER / f"{guide}.py").read_text(encoding="utf-8")


def test_the_index_lists_every_guide():
    assert len(GUIDES) >= 4
    assert re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) ", INDEX, re.M) != []
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]", INDEX, re.M)) == GUIDES


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_the_form_of_keras_io(guide):
    lines = source_of(guide).splitlines()
    assert lines[0] == '"""'
    fields = ["Title", "Author", "Date created", "Last modified", "Description"]
    for line, field in zip(lines[1:], fields, strict=False):
        assert re.fullmatch(rf"{field}: \S.*", line), line
    description = lines[5].removeprefix("Description: ")
    assert description[0].isupper()
    assert description.endswith(".")
    assert len(description) <= 100
    assert lines[6] == '"""'
    # A cell of prose begins and ends with a line of three quotation marks alone.
    assert all(line == '"""' for line in lines if line.startswith('"""'))
    assert not any(line != line.rstrip() for line in lines)
    kinds = [kind for kind, _ in cells_of(guide)]
    assert kinds[0] == kinds[-1] == "prose"
    assert kinds.count("code") >= 5


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_stands_alone_and_asserts_equal_weights(guide):
    tree = ast.parse(source_of(guide))
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported.isdisjoint(GUIDES)
    asserts = [
        ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Assert)
    ]
    assert len(asserts) >= 3
    assert any("len(set(hashes)) == 1" in text for text in asserts)


@pytest.mark.parametrize("guide", [*GUIDES, "README"])
def test_what_a_guide_mentions_is_there(guide):
    text = INDEX if guide == "README" else source_of(guide)
    files = re.findall(r"`((?:docs|recipes|tests)/[\w/.-]+\.\w+)`", text)
    for name in files:
        assert (ROOT / name).is_file(), name
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (FOLDER / link).is_file(), link
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (FOLDER / name).is_file() or name == "tutobooks.py", name
    for name in re.findall(r"python (docs/\S+\.py)", text):
        assert (ROOT / name).is_file(), name
