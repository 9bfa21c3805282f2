"""The pages on large batches: their code runs, and the table of presets is complete."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.pages import run_page

import tfdist
from tfdist.optimizers import LAMB, LARS, RMSpropWarmup

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "large-batches.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    tfdist.shutdown()


def test_the_code_on_rates_runs():
    names = run_page("large-batches.md")
    steps = (0, 99, 100, 30 * 20 - 1, 30 * 20, 60 * 20)
    found = [float(names["rate"](step)) for step in steps]
    assert found == pytest.approx([0.1, 0.199, 0.2, 0.2, 0.02, 0.002])


def test_the_code_on_optimizers_runs():
    names = run_page("large-batch-optimizers.md")
    assert isinstance(names["lars"], LARS) and isinstance(names["lamb"], LAMB)
    assert isinstance(names["rms"], RMSpropWarmup)


def test_the_code_on_adasum_runs():
    model = run_page("adasum.md")["model"]
    model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)


def test_the_table_has_every_preset():
    source = (ROOT / "recipes" / "schedules.py").read_text(encoding="utf-8")
    table = source.split("\nPRESETS = {")[1].split("\n}\n")[0]
    presets = re.findall(r'^    "(\w+)": ', table, re.MULTILINE)
    section = TEXT.split("\n## Named settings")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == presets
