"""Words of docs/retired-words.txt are gone from the whole tree."""

import re
import subprocess

from helpers.tree import ROOT

RETIRED = ROOT / "docs" / "retired-words.txt"
# Written at an earlier time, with the names of that time.
RECORDS = ("benchmarks/records/", "tests/mutants/python/", "CHANGELOG.md")
SUFFIXES = (".py", ".cc", ".h", ".cu", ".md", ".toml", ".yaml", ".txt")


def retired():
    """The old names."""
    lines = RETIRED.read_text().splitlines()
    return [line.split()[0] for line in lines if not line.startswith("#")]


def places(pattern, text):
    return [n for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def test_no_retired_word_is_used():
    words = retired()
    assert len(words) > 20
    pattern = re.compile(rf"\b({'|'.join(words)})\b")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [
        f"{name}:{line}"
        for name in listed
        if name.endswith(SUFFIXES) and not name.startswith(RECORDS)
        if (path := ROOT / name) != RETIRED and path.is_file()
        for line in places(pattern, path.read_text(errors="replace"))
    ]
    assert found == []


def test_the_search_sees_a_word_and_not_a_part_of_one():
    pattern = re.compile(r"\b(Bond)\b")
    assert places(pattern, "a\nclass Bond:\nBonded") == [2]
