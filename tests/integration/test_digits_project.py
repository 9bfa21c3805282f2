"""recipes/digits_project, copied alone to another place, is run as its README says."""

import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import yaml
from helpers.launcher import clean_environment

PROJECT = Path(__file__).resolve().parents[2] / "recipes" / "digits_project"
TIMEOUT_S = 100


def module(name):
    """A module of the project, under a name of its own."""
    spec = importlib.util.spec_from_file_location(
        f"digits_{name}", PROJECT / f"{name}.py"
    )
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


config = module("config")
dataset = module("dataset")


def run(folder, *settings, ranks=2):
    """Runs main.sh from elsewhere."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [str(folder / "main.sh"), *settings],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=clean_environment(PATH=path, NP=str(ranks), TFDIST_TIMEOUT_S="60"),
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy without what earlier runs have left."""
    return shutil.copytree(
        PROJECT,
        tmp_path_factory.mktemp("copy") / "mine",
        ignore=shutil.ignore_patterns("runs", "tfdist-logs", "__pycache__"),
    )


# In `make test` a recipe learns: test_recipes.py.
@pytest.mark.slow
def test_two_ranks_learn_and_leave_a_run_folder(copied):
    done = run(copied, "epochs=10", "lr_init=5e-3")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {line[:8] for line in done.stdout.splitlines()} == {"[rank 0]"}

    latest = copied / "runs" / "latest"
    folders = [path for path in (copied / "runs").iterdir() if path != latest]
    assert [latest.resolve()] == [folder.resolve() for folder in folders]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folders[0].name)
    assert sorted(path.name for path in latest.iterdir()) == [
        *("config.yaml", "log.csv", "log.txt", "model.keras", "summary.yaml")
    ]

    settings = config.load([], latest / "config.yaml")
    assert settings == config.load(["epochs=10", "lr_init=0.005"])
    summary = yaml.safe_load((latest / "summary.yaml").read_text())
    assert summary["ranks"] == 2
    assert summary["test_accuracy"] >= 0.96
    with (latest / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(10))
    printed = re.findall(r"epoch (\d+) of 10: accuracy (0\.\d+)", done.stdout)
    assert [int(epoch) for epoch, _ in printed] == list(range(1, 11))
    for (_, accuracy), row in zip(printed, rows, strict=True):
        assert accuracy == f"{float(row['accuracy']):.4f}"
    log = (latest / "log.txt").read_text().splitlines()
    assert log == [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]

    # The saved model is the one tested; without tfdist it is a model like any other.
    model = keras.models.load_model(latest / "model.keras")
    data = dataset.load(settings.test_part, settings.seed)
    loss, accuracy = model.evaluate(*data.test, verbose=0)
    assert summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-5)
    assert summary["test_loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
def test_one_rank_and_three_learn_as_much(copied, tmp_path):
    runs = tmp_path / "runs {seed}"  # braces are as they are
    for ranks in (1, 3):
        done = run(copied, "batch_size=60", f"runs={runs}", ranks=ranks)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        latest = runs / "latest"
        assert (latest / "model.keras").exists()
        summary = yaml.safe_load((latest / "summary.yaml").read_text())
        assert summary["ranks"] == ranks
        assert summary["test_accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("epoch=3", "epoch=3: unknown setting 'epoch'. Did you mean epochs?"),
        ("batch_size=63", "divisible by 2 ranks and not above the 1438 training"),
        ("batch_size=1440", "divisible by 2 ranks and not above the 1438 training"),
    ],
)
def test_what_cannot_be_trained_is_one_line(copied, setting, words):
    done = run(copied, setting)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_ends_all_ranks(copied):
    done = run(copied, "runs=/dev/null/runs")
    assert done.returncode == 1
    assert re.search(r"\[rank 0\] main.py: .*'/dev/null/runs'", done.stderr)
    assert re.search(r"^tfdistrun: rank 0 .*failed first", done.stderr, re.MULTILINE)


def test_a_setting_given_twice_has_the_last_value():
    assert config.load(["epochs=3", "epochs=4"]).epochs == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("epoch=3", "unknown setting 'epoch'. Did you mean epochs?"),
        ("LR_INIT=3", "unknown setting 'LR_INIT'. Did you mean "),
        ("batchsize=3", "Did you mean batch_size?"),
        ("epochs", "Expected key=value, got 'epochs'"),
        ("epochs=", "epochs=: expected a whole number for epochs, got ''"),
        ("epochs=2.5", "expected a whole number for epochs, got '2.5'"),
        ("lr_init=fast", "expected a number for lr_init, got 'fast'"),
        ("lr_init=nan", "Expected lr_init > 0, got nan"),
        ("epochs=0", "Expected epochs > 0, got 0"),
        ("dropout=1", "Expected dropout in 0..1, got 1.0"),
        ("test_part=0", "Expected test_part > 0, got 0"),
    ],
)
def test_a_setting_that_is_not_good_is_named(override, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        config.load([override])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text + "epoch: 3\n", "unknown setting 'epoch'"),
        (lambda text: text.replace("epochs: 20", "epochs:"), "one value for epochs"),
        (lambda text: text.replace("epochs: 20", "epochs: [1]"), "got [1]"),
        (lambda text: text.replace("epochs: 20", ""), "expected values for epochs too"),
        (lambda text: "just words", "expected lines of the form `key: value`"),
        (lambda text: "", "expected values for seed, epochs, "),
    ],
)
def test_a_file_that_is_not_good_is_named(change, words, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(change(config.FILE.read_text()))
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        config.load([], file)
    assert str(file) in str(raised.value)


def test_the_project_is_small_and_needs_nothing_beside_itself():
    own = {path.stem for path in PROJECT.glob("*.py")}
    assert own == {"config", "dataset", "main", "network", "trainer"}
    for path in PROJECT.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 80, path
        imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
        known = {"keras", "numpy", "tfdist", "yaml"} | sys.stdlib_module_names
        assert imported <= own | known, path
