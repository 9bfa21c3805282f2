"""The shipped examples do what README.md says of them, through the real launcher."""

import ast
import contextlib
import difflib
import functools
import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launcher import clean_environment
from helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
RECIPES = ("mnist_fit", "mnist_tape")
ALONE = Path(__file__).with_name("mnist_alone.py")


@functools.cache
def output_of(recipe: str, ranks: int, epochs: int = 0) -> str:
    """What the recipe prints; with one rank it runs without the launcher.

    Args:
        recipe: its name.
        ranks: how many.
        epochs: 0: as many as it has itself.
    """
    if epochs:
        short = f"import {recipe} as own; own.EPOCHS = {epochs}; own.main()"
        return output_of_program("-c", short, ranks=ranks)
    return output_of_program(str(ROOT / "recipes" / f"{recipe}.py"), ranks=ranks)


def output_of_program(*words: str, ranks: int = 1) -> str:
    bin_dir = Path(sys.executable).parent
    launcher = [str(bin_dir / "tfdistrun"), "-np", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [*launcher, sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=clean_environment(
            TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=str(ROOT / "recipes")
        ),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def accuracy_of(output: str) -> float:
    found = re.findall(r"test accuracy (0\.\d+)", output)
    assert len(found) == 1, f"expected the accuracy once: {output[-1000:]}"
    return float(found[0])


def trained(recipe, epochs):
    """Returns the output of a rank of the recipe, in a process that has TensorFlow."""
    sys.path.insert(0, str(ROOT / "recipes"))
    own = importlib.import_module(recipe)
    own.EPOCHS = epochs
    with contextlib.redirect_stdout(io.StringIO()) as output:
        own.main()
    return output.getvalue()


def test_two_ranks_without_a_launcher_learn_and_end_with_the_same_weights():
    output, silence = run_ranks(trained, 2, "mnist_fit", 2)
    assert accuracy_of(output) >= 0.9
    assert re.search(r"same weights on all ranks: [0-9a-f]{12}$", output, re.MULTILINE)
    assert re.search(r"[1-9]\d* images/s on 2 ranks together", output)
    assert silence == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "epochs", "accuracy"),
    [("mnist_fit", 3, 0.9), ("mnist_fit", 0, 0.96), ("mnist_tape", 0, 0.96)],
)
def test_two_ranks_learn_and_end_with_the_same_weights(recipe, epochs, accuracy):
    output = output_of(recipe, 2, epochs)
    assert accuracy_of(output) >= accuracy
    assert "Warning" not in output
    assert re.search(r"same weights on all ranks: [0-9a-f]{12}$", output, re.MULTILINE)
    assert re.search(r"[1-9]\d* images/s on 2 ranks together", output)
    # One rank speaks for all: one progress bar, one report.
    assert {line[:8] for line in output.splitlines()} == {"[rank 0]"}


@pytest.mark.slow
@pytest.mark.parametrize("with_tfdist", [True, False])
def test_two_ranks_are_as_good_as_one_process_on_the_same_global_batch(with_tfdist):
    together = accuracy_of(output_of("mnist_fit", 2))
    output = output_of("mnist_fit", 1) if with_tfdist else output_of_program(str(ALONE))
    assert accuracy_of(output) >= 0.96
    assert abs(together - accuracy_of(output)) <= 0.01


def statements(source):
    """Each statement as one line, however it is wrapped; no comments, no docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(tree).splitlines()


def numbered_statements(source):
    """The statements whose first line ends in a number in a comment, in order."""
    numbers = {
        number: int(found[1])
        for number, line in enumerate(source.splitlines(), 1)
        if (found := re.search(r"  # (\d)\b", line))
    }
    assert list(numbers.values()) == list(range(1, len(numbers) + 1))
    return [
        ast.unparse(node).splitlines()[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno in numbers
    ]


def test_five_statements_change_against_the_program_for_one_process():
    recipe = (ROOT / "recipes" / "mnist_fit.py").read_text(encoding="utf-8")
    alone = ALONE.read_text(encoding="utf-8")
    assert "tfdist" not in re.sub(r'^""".*?"""', "", alone, flags=re.DOTALL)
    difference = difflib.ndiff(statements(alone), statements(recipe))
    new = [line[2:].strip() for line in difference if line.startswith("+ ")]
    assert len(new) <= 5, new
    assert sorted(new) == sorted(numbered_statements(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_statement_with_tfdist_is_numbered(recipe):
    source = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    used = [line for line in statements(source) if re.search(r"\btfdist\b", line)]
    assert len(used) >= 5
    numbered = numbered_statements(source)
    assert sorted(line.strip() for line in used) == sorted(numbered)
