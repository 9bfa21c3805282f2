"""The README's way from tars to a training on two ranks: its commands.

In `make test-slow` they run as they stand, and with a small network; `make test` trains
with the recipe itself (tests/parallel/test_imagenet_recipe.py).
"""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.launcher import clean_environment

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280


def commands():
    """The lines of the README's section on ImageNet."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## ImageNet\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return block.replace("\\\n", "").strip().splitlines()


def test_what_the_commands_name_is_there():
    named = re.findall(r"\S+\.py\b", "\n".join(commands()))
    assert len(named) >= 2
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.slow
@pytest.mark.deadline(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    ("option", "network"),
    [
        (" --network=resnet8", "resnet8, "),
        ("", "resnet50, 25,"),
    ],
)
def test_the_commands_of_the_readme_train_on_two_ranks(option, network, tmp_path):
    lines = commands()
    assert len(lines) <= 4
    lines[-1] += option
    # As in a checkout: the same paths, but what is written stays out of it.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for line in lines:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=clean_environment(),
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"[-5000:]
    assert network in done.stdout
    assert "160 training pictures, 40 validation pictures" in done.stdout
    assert "global batch 16 = 2 ranks x 8; 1 epochs of 10 steps" in done.stdout
    run = tmp_path / "runs" / "latest"
    [row] = csv.DictReader((run / "log.csv").open())
    assert float(row["loss"]) < 20 and float(row["samples_per_s"]) > 0
    results = yaml.safe_load((run / "results.yaml").read_text())
    assert float(row["val_top_1"]) == pytest.approx(results["top_1"])
    for name in ("final.keras", "curves.png", "checkpoints/step-00000010.keras"):
        assert (run / name).stat().st_size > 10_000
