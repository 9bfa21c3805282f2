"""The list of breakages that the tests must notice fits the code."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "mutants" / "mutants.toml"


def test_what_each_mutant_replaces_stands_in_its_file_exactly_once():
    mutants = tomllib.loads(LIST.read_text())["mutant"]
    assert len(mutants) > 100
    found = {
        mutant["id"]: (ROOT / mutant["file"]).read_text().count(mutant["find"])
        for mutant in mutants
    }
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert len(found) == len(mutants)
