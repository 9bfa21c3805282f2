"""docs/imagenet.md names every flag of the recipe, and every file that a run writes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "imagenet.md").read_text(encoding="utf-8")


def recipe(name):
    return (ROOT / "recipes" / f"{name}.py").read_text(encoding="utf-8")


def test_every_flag_is_on_the_page():
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", recipe("resnet50_imagenet"))
    assert len(flags) >= 30
    assert set(flags) - set(re.findall(r"--(\w+)", PAGE)) == set()


@pytest.mark.parametrize("name", ["resnet50_imagenet", "run_folder", "summary"])
def test_every_file_of_a_run_is_in_the_table(name):
    table = PAGE.split("## The run and its folder")[1].split("\n\n")[2]
    files = set(re.findall(r"\"(\w+\.(?:csv|keras|png|yaml))\"", recipe(name)))
    assert files and files - set(re.findall(r"`([\w.]+)`", table)) == set()
