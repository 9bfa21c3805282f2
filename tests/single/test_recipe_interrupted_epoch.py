"""recipes/interrupted_epoch.py without training: what it keeps, and how it adds up."""

import math
import sys
import zipfile
from pathlib import Path

import pytest

import tfdist

RECIPES = str(Path(__file__).resolve().parents[2] / "recipes")


@pytest.fixture
def interrupted_epoch(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    import interrupted_epoch

    tfdist.init()
    yield interrupted_epoch
    tfdist.shutdown()
    for name in ("interrupted_epoch", "run_folder"):
        sys.modules.pop(name, None)


def test_a_part_is_kept_as_long_as_its_checkpoint(interrupted_epoch, tmp_path):
    parts = {
        step: interrupted_epoch.Part({"loss/total": step / 3}, step, 0.1 * step, 2.0)
        for step in (3, 5, 7)
    }
    (tmp_path / "checkpoints").mkdir()
    for step in (3, 5):
        interrupted_epoch.save_part(tmp_path, step, parts[step])
        path = tmp_path / f"checkpoints/step-{step:08d}.keras"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("model.weights.h5", "x" * 100)
    (tmp_path / "checkpoints/step-00000003.keras").unlink()
    interrupted_epoch.save_part(tmp_path, 7, parts[7])
    assert interrupted_epoch.load_part(tmp_path, 3) is None
    assert interrupted_epoch.load_part(tmp_path, 5) == parts[5]
    assert interrupted_epoch.load_part(tmp_path, 7) == parts[7]


def test_without_a_part_nothing_is_known(interrupted_epoch, tmp_path):
    assert interrupted_epoch.load_part(tmp_path, 3) is None


@pytest.mark.parametrize(
    ("earlier", "batches", "per_s", "expected"),
    [
        # 90 batches of 20 images in 9 s and 10 in 1 s, or in 2 s.
        ((90, 9.0), 10, 200.0, 200.0),
        ((90, 9.0), 10, 100.0, 100 * 20 / 11),
        # One batch, which builds the graph, says nothing about the speed.
        ((90, 9.0), 0, 8.0, 200.0),
        ((0, 0.0), 0, 8.0, math.nan),
        (None, 0, 8.0, math.nan),
        (None, 10, 100.0, 100.0),
    ],
)
def test_the_speed_is_that_of_all_timed_batches(
    earlier, batches, per_s, expected, interrupted_epoch
):
    part = earlier and interrupted_epoch.Part({}, *earlier, epoch_s=60.0)
    found = interrupted_epoch.samples_per_s(part, batches, per_s, 20)
    assert found == pytest.approx(expected, nan_ok=True)
