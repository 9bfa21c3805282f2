"""recipes/run_folder.py: what a run that goes on finds, and removes."""

import importlib.util
import os
import re
import zipfile
from pathlib import Path

import pytest
import yaml
from absl import flags

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
    assert run_folder.checkpoints(folder) == [path_of(folder, s) for s in (8, 16)]
    for step in (8, 16):
        path_of(folder, step).write_bytes(b"")
    with pytest.raises(ValueError, match="is not a complete .keras file"):
        run_folder.last_checkpoint(folder)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"step-\*.keras in .*, found none"):
        run_folder.last_checkpoint(folder)


def test_a_damaged_checkpoint_is_skipped_also_in_a_folder_like_a_pattern(tmp_path):
    (tmp_path / "run[1]").mkdir()
    folder = saved(tmp_path / "run[1]", 8, 16)
    digest = "0" * 64  # of a different content
    Path(f"{path_of(folder, 16)}.sha256").write_text(f"{digest}  step-00000016.keras\n")
    assert run_folder.last_checkpoint(folder) == path_of(folder, 8)
    run_folder.remove_old_checkpoints(
        folder, keep=1, ends_epoch=lambda steps: steps % 4 == 0
    )
    assert names(folder) == ["step-00000016.keras", "step-00000016.keras.sha256"]


def test_damaged_checkpoints_do_not_take_the_place_of_later_ones(tmp_path):
    folder = saved(tmp_path, 8, 16, 24, 32, 40)
    for step in (24, 32):
        digest = Path(f"{path_of(folder, step)}.sha256")
        digest.write_text(f"{'0' * 64}  {path_of(folder, step).name}\n")
    path_of(folder, 40).write_bytes(b"broken")
    content = path_of(folder, 32).read_bytes()
    run_folder.set_aside_damaged(folder, 16)
    newest = run_folder.checkpoints(folder)[-1]
    assert newest == run_folder.last_checkpoint(folder) == path_of(folder, 16)
    aside = path_of(folder, 32).with_suffix(".keras.damaged")
    assert aside.read_bytes() == content
    (folder / "new").mkdir()
    for step in (24, 25):
        saved(folder / "new", step)
        path_of(folder / "new", step).rename(path_of(folder, step))
        (folder / "new/checkpoints").rmdir()
        run_folder.remove_old_checkpoints(folder, 1, lambda steps: steps % 8 == 0)
        assert run_folder.last_checkpoint(folder) == path_of(folder, step)


def test_newer_checkpoints_of_another_job_are_not_set_aside(tmp_path):
    folder = saved(tmp_path, 8, 16)
    run_folder.set_aside_damaged(folder, 8)
    assert names(folder) == [path_of(folder, step).name for step in (8, 16)]


def test_the_newest_checkpoints_of_epochs_and_of_steps_are_kept(tmp_path):
    folder = saved(tmp_path, 4, 8, 12, 16, 20, 24, 28, 32)
    path_of(folder, 32).write_bytes(b"broken")  # it does not count, and stays
    run_folder.remove_old_checkpoints(
        folder, keep=2, ends_epoch=lambda steps: steps % 8 == 0
    )
    kept = (16, 20, 24, 28, 32)
    assert names(folder) == [path_of(folder, step).name for step in kept]
    run_folder.remove_old_checkpoints(
        folder, keep=1, ends_epoch=lambda steps: steps % 8 == 0
    )
    kept = (24, 28, 32)
    assert names(folder) == [path_of(folder, step).name for step in kept]
    path_of(folder, 28).rename(path_of(folder, 22))  # older than the last epoch
    run_folder.remove_old_checkpoints(
        folder, keep=1, ends_epoch=lambda steps: steps % 8 == 0
    )
    kept = (24, 32)
    assert names(folder) == [path_of(folder, step).name for step in kept]


def test_parts_of_files_are_removed(tmp_path):
    folder = saved(tmp_path, 8, 16)
    for name in ("checkpoints/.partial-1f-step-00000040.keras", ".partial-1f-best"):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1e9, 1e9))
    run_folder.tidy(folder, 3)
    assert names(folder) == [path_of(folder, step).name for step in (8, 16)]
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]


def test_what_another_job_is_saving_in_the_same_folder_stays(tmp_path):
    """It was not killed: it goes on with the same run, by mistake or not."""
    folder = saved(tmp_path, 8)
    saving = folder / "checkpoints" / ".partial-1f-step-00000016.keras"
    saving.write_bytes(b"x")
    run_folder.tidy(folder, 3)
    assert names(folder) == [saving.name, path_of(folder, 8).name]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (["0,6.5\n", "1,6.2\n"], ["0,6.5\n", "1,6.2\n"]),
        (["0,6.5\n", "1,6.2\n", "2,6.0\n"], ["0,6.5\n", "1,6.2\n"]),  # comes again
        (["0,6.5\n", "1,6."], ["0,6.5\n"]),
        (["0,6.5\n", "1\n"], ["0,6.5\n"]),
        (["0,6.5\n", "1,6.2,7\n"], ["0,6.5\n", "1,6.2,7\n"]),  # of other columns
        ([], []),
    ],
)
def test_the_log_has_whole_lines_of_epochs_that_are_done(rows, kept, tmp_path):
    (tmp_path / "log.csv").write_text("".join([HEAD, *rows]))
    run_folder.tidy(tmp_path, 2)
    assert (tmp_path / "log.csv").read_text() == "".join([HEAD, *kept])


def test_a_line_that_lacks_columns_is_no_line(tmp_path):
    text = "epoch,loss,accuracy\n0,6.5,0.1\n"
    (tmp_path / "log.csv").write_text(text + "1,6.2\n")
    run_folder.tidy(tmp_path, 2)
    assert (tmp_path / "log.csv").read_text() == text


def test_a_remote_folder_is_refused_and_not_made_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"got gs://bucket/runs\. Mount it"):
        run_folder.new("gs://bucket/runs", "resnet8")
    assert not list(tmp_path.iterdir())


def test_errors_name_the_option_that_helps(tmp_path):
    with pytest.raises(FileNotFoundError, match="--resume expects the folder of a run"):
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


def test_a_log_whose_first_line_is_torn_begins_again(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,lo")
    run_folder.tidy(tmp_path, 2)
    assert (tmp_path / "log.csv").read_text() == ""  # so it gets a first line


def test_a_run_goes_on_with_as_many_pictures_as_it_began_with(tmp_path):
    run_folder.check_pictures(tmp_path, 64)  # it does not say how many there were
    run_folder.save(tmp_path, {"train": 64}, run_folder.PICTURES)
    run_folder.check_pictures(tmp_path, 64)
    with pytest.raises(
        ValueError, match="began with 64 .* continue with 32. Give it the"
    ):
        run_folder.check_pictures(tmp_path, 32)


@pytest.fixture
def values():
    made = flags.FlagValues()
    flags.DEFINE_string("output_dir", "runs", "", made)
    flags.DEFINE_integer("keep", 3, "", flag_values=made)
    flags.DEFINE_integer("epochs", None, "", flag_values=made)
    flags.DEFINE_bool("tensorboard", True, "", made)
    made(["script.py"])
    return made


def configured(values, *words, file=None):
    files = [] if file is None else [file]
    return run_folder.configuration(values, list(values), words, *files)


@pytest.mark.parametrize("text", ["no", "null", "2026", "a: b", "x=1", "'"])
def test_a_name_is_what_was_written(text, values, tmp_path):
    config = configured(values, f"output_dir={text}")
    assert config["output_dir"] == text
    run_folder.save(tmp_path, config)
    assert configured(values, file=tmp_path / "config.yaml") == config


def test_words_that_are_no_text_mean_what_yaml_says(values):
    config = configured(values, "tensorboard=no", "keep=5", "epochs=null")
    expected = {"epochs": None, "keep": 5, "output_dir": "runs", "tensorboard": False}
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("output_dir: no", "output_dir: expected text, got False .*Write it in quotes"),
        ("output_dir: [a]", r"expected text, got \['a'\]"),
        ("keep: null", "keep: expected a value, got none in .*my.yaml"),
        ("keep: two", "keep: 'two' in .*my.yaml"),
    ],
)
def test_what_a_file_cannot_say_is_refused(line, message, values, tmp_path):
    (tmp_path / "my.yaml").write_text(line)
    with pytest.raises(ValueError, match=message):
        configured(values, file=tmp_path / "my.yaml")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("epochs=", "Expected a value after epochs=, got none"),
        ("output_dir=", "Expected a value after output_dir="),
        ("keep=null", "keep: expected a value, got none in the command line"),
        ("tensorboard=[", r"tensorboard: '\[' in the command line"),
    ],
)
def test_words_without_a_value_are_refused(word, message, values):
    with pytest.raises(ValueError, match=message):
        configured(values, word)


def test_jobs_that_save_at_once_do_not_take_each_others_part(tmp_path, monkeypatch):
    replace = Path.replace

    def while_another_saves(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        run_folder.save(tmp_path, {"of": "another job"})
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", while_another_saves)
    run_folder.save(tmp_path, {"of": "this job"})
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.CONFIG]
    saved = yaml.safe_load((tmp_path / run_folder.CONFIG).read_text())
    assert saved == {"of": "this job"}
