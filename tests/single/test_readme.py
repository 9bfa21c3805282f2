"""README.md: its table of names is what the modules have."""

import importlib
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["callbacks", "data", "layers", "optimizers"])
def test_the_table_has_every_public_name_of_a_module(module):
    [row] = re.findall(rf"^\| `tfdist\.{module}` \| `(.+)` \|$", TEXT, re.MULTILINE)
    public = importlib.import_module(f"tfdist.{module}").__all__
    assert sorted(row.split()) == sorted(public)
