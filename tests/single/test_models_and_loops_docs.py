"""The lines of docs/models-and-loops.md run, and what it links to is there."""

import re
from pathlib import Path

import keras
import pytest
from helpers.pages import blocks_of, run_page

import tfdist
from tfdist.training.optimizer import is_distributed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models-and-loops.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_lines_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.utils.clear_session()
    assert len(blocks_of("models-and-loops.md")) >= 14
    names = run_page("models-and-loops.md")
    assert type(names["model"].optimizer).__name__ == "Adam"
    assert not is_distributed(names["adam"])  # a tape reduces what it applies

    class Own(keras.Sequential):
        train_step = names["train_step"]

    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    rate = keras.optimizers.SGD(0.1)
    model.compile(tfdist.DistributedOptimizer(rate), jit_compile=False)
    [loss] = model.fit(names["train"], verbose=0).history["mse"]
    assert loss > 0
    assert rate.iterations == 6
    assert all(g is not None for g in names["grads"])


def test_links_and_files_are_there():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert {Path(link).name for link in links} >= {
        path.name for path in (ROOT / "recipes" / "examples").glob("*.py")
    }
    for link in links:
        assert (PAGE.parent / link.partition("#")[0]).is_file(), link
    for name in re.findall(r"`(?:tests/parallel/)?(test_\w+\.py)`", TEXT):
        assert (ROOT / "tests" / "parallel" / name).is_file(), name
