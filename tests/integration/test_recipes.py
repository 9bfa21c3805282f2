"""The shipped examples do what README.md says of them, through the real launcher."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launcher import clean_environment

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
RECIPES = ("mnist_fit", "mnist_tape")


@functools.cache
def output_of(recipe: str, ranks: int) -> str:
    """What the recipe prints; with one rank it runs without the launcher."""
    bin_dir = Path(sys.executable).parent
    launcher = [str(bin_dir / "tfdistrun"), "-np", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [*launcher, sys.executable, str(ROOT / "recipes" / f"{recipe}.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=clean_environment(TF_CPP_MIN_LOG_LEVEL="2"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def accuracy_of(output: str) -> float:
    found = re.findall(r"test accuracy (0\.\d+)", output)
    assert len(found) == 1, f"expected the accuracy once: {output[-1000:]}"
    return float(found[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_learn_and_end_with_the_same_weights(recipe):
    output = output_of(recipe, 2)
    assert accuracy_of(output) >= 0.96
    assert re.search(r"same weights on all ranks: [0-9a-f]{12}$", output, re.MULTILINE)
    assert re.search(r"[1-9]\d* images/s on 2 ranks together", output)
    # One rank speaks for all: one progress bar, one report.
    assert {line[:8] for line in output.splitlines()} == {"[rank 0]"}


def test_two_ranks_are_as_good_as_one_process_on_the_same_global_batch():
    together, alone = (accuracy_of(output_of("mnist_fit", ranks)) for ranks in (2, 1))
    assert alone >= 0.96
    assert abs(together - alone) <= 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_five_lines_change(recipe):
    text = (ROOT / "recipes" / f"{recipe}.py").read_text()
    code = text.split("def main", 1)[1]
    assert re.findall(r"  # (\d)", code) == ["1", "2", "3", "4", "5"]


def test_readme_shows_the_example_that_make_train_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipe = (ROOT / "recipes" / "mnist_fit.py").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert any(recipe.endswith(block) and "def main" in block for block in shown), (
        "copy recipes/mnist_fit.py, from its first import on, into README.md"
    )
