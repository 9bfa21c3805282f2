"""docs/large-batches.md: its lines run, its links and its table are right."""

import re
from pathlib import Path

import pytest
from helpers.pages import run_page

import tfdist
from tfdist.optimizers import LAMB, LARS, RMSpropWarmup

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "large-batches.md").read_text(encoding="utf-8")


def test_all_lines_of_the_page_run():
    names = run_page("large-batches.md")
    assert isinstance(names["lars"], LARS) and isinstance(names["lamb"], LAMB)
    assert isinstance(names["rms"], RMSpropWarmup)
    steps = (0, 99, 100, 30 * 20 - 1, 30 * 20, 60 * 20)
    found = [float(names["rate"](step)) for step in steps]
    assert found == pytest.approx([0.1, 0.199, 0.2, 0.2, 0.02, 0.002])
    tfdist.shutdown()


def test_the_table_has_every_preset():
    source = (ROOT / "recipes" / "schedules.py").read_text(encoding="utf-8")
    table = source.split("\nPRESETS = {")[1].split("\n}\n")[0]
    presets = re.findall(r'^    "(\w+)": ', table, re.MULTILINE)
    section = TEXT.split("\n## Named settings")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == presets
