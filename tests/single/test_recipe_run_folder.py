"""recipes/run_folder.py: what a run that goes on finds, and removes."""

import importlib.util
import re
import zipfile
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SPEC = importlib.util.spec_from_file_location("run_folder", RECIPES / "run_folder.py")
run_folder = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_folder)

HEAD = "epoch,loss\n"


def saved(folder, *steps):
    """A run's folder with checkpoints."""
    (folder / "checkpoints").mkdir()
    for step in steps:
        with zipfile.ZipFile(path_of(folder, step), "w") as file:
            file.writestr("model.weights.h5", "x" * 100)
    return folder


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}.keras"


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_whole_checkpoint_counts(tmp_path):
    folder = saved(tmp_path, 8, 16, 123456789)
    newest = path_of(folder, 123456789)
    assert run_folder.last_checkpoint(folder) == newest
    assert run_folder.steps_of(newest) == 123456789
    newest.write_bytes(newest.read_bytes()[:-30])
    assert run_folder.last_checkpoint(folder) == path_of(folder, 16)
    assert run_folder.checkpoints(folder, whole=False) == [newest]
    for step in (8, 16):
        path_of(folder, step).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="found none that is whole"):
        run_folder.last_checkpoint(folder)


def test_old_checkpoints_and_parts_of_files_are_removed(tmp_path):
    folder = saved(tmp_path, 8, 16, 24, 32)
    (folder / "checkpoints" / ".partial-1f-step-00000040.keras").write_bytes(b"x")
    (folder / ".partial-1f-best.keras").write_bytes(b"x")
    path_of(folder, 32).write_bytes(b"broken")
    run_folder.tidy(folder, 3, keep=2)
    assert names(folder) == [path_of(folder, step).name for step in (16, 24, 32)]
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (["0,6.5\n", "1,6.2\n"], ["0,6.5\n", "1,6.2\n"]),
        (["0,6.5\n", "1,6.2\n", "2,6.0\n"], ["0,6.5\n", "1,6.2\n"]),  # comes again
        (["0,6.5\n", "1,6."], ["0,6.5\n"]),
        (["0,6.5\n", "1\n"], ["0,6.5\n"]),
        ([], []),
    ],
)
def test_the_log_has_whole_lines_of_epochs_that_are_done(rows, kept, tmp_path):
    (tmp_path / "log.csv").write_text("".join([HEAD, *rows]))
    run_folder.tidy(tmp_path, 2, keep=3)
    assert (tmp_path / "log.csv").read_text() == "".join([HEAD, *kept])


def test_errors_name_the_option_that_helps(tmp_path):
    with pytest.raises(FileNotFoundError, match="--resume takes the folder of a run"):
        run_folder.read(tmp_path / "config.yaml")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=f"{re.escape(str(file))}.*--output_dir"):
        run_folder.new(file / "runs", "resnet8")
    with pytest.raises(OSError, match="--output_dir"):
        run_folder.new(file, "resnet8")


def test_two_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260102-030405")
    first, second = (run_folder.new(tmp_path, "resnet8") for _ in range(2))
    assert first != second
    assert (tmp_path / "latest").resolve() == second
