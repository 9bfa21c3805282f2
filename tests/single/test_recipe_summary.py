"""recipes/summary.py: what it reads from a log, says, and draws."""

import importlib.util
import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SPEC = importlib.util.spec_from_file_location("summary", RECIPES / "summary.py")
summary = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = summary
SPEC.loader.exec_module(summary)

COLUMNS = (
    "epoch,epoch_s,exposed_communication,learning_rate,loss,samples_per_s,top_1,"
    "val_loss,val_top_1"
)


def row(epoch, top_1=0.5, val_top_1=0.5):
    return f"{epoch},60,0.04,0.1,2.5,1500,{top_1},2.0,{val_top_1}"


def write(folder, *lines):
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return folder


def rows_of(text):
    return {line[:24].split("  ")[0]: line for line in text.splitlines()}


def drawn(folder):
    """How many pixels of the picture have the color of a curve."""
    picture = matplotlib.image.imread(folder / "curves.png")[..., :3]
    colors = {"training": (0x1F, 0x6F, 0xB2), "validation": (0xD9, 0x66, 0x1F)}
    return {
        name: int((np.abs(picture - np.array(color) / 255).max(-1) < 0.02).sum())
        for name, color in colors.items()
    } | {"height": picture.shape[0], "width": picture.shape[1]}


def test_the_table_tells_the_best_epoch_and_the_last(tmp_path):
    write(
        *(tmp_path, COLUMNS),
        *(row(e, v, v + 0.1) for e, v in enumerate((0.1, 0.6, 0.3))),
    )
    text = summary.write_summary(
        tmp_path, {"loss": 1.25, "top_1": 0.4}, {"train": 2, "validation": 0}
    )
    rows = rows_of(text)
    assert rows["epochs"].endswith(" 3")
    assert rows["validation accuracy"].endswith("0.4000, best 0.7000 in epoch 2")
    assert rows["training accuracy"].endswith("0.3000, best 0.6000 in epoch 2")
    assert "1500 (1500 to 1500)" in rows["images/s"]
    assert "4.0% of the time" in rows["exposed communication"]
    assert rows["time of epochs"].endswith("3 min 00 s")
    assert rows["evaluation"].endswith("loss 1.2500, top_1 0.4000")
    assert rows["corrupt, skipped"].endswith("2 (train)")
    assert "curves.png, log.csv" in rows["files"]
    pixels = drawn(tmp_path)
    assert pixels["training"] > 500 and pixels["validation"] > 200


def test_epochs_of_a_run_that_went_on_count_once_and_all_their_time(tmp_path):
    lines = [row(0), row(1), row(2, val_top_1=0.9), row(2, val_top_1=0.6), row(3)]
    write(tmp_path, COLUMNS, *lines)
    history = summary.read_history(tmp_path / "log.csv")
    assert history.epochs == [1, 2, 3, 4]
    assert history.columns["val_top_1"] == [0.5, 0.5, 0.6, 0.5]
    assert history.resumed == [2.0]
    assert history.seconds == 300
    for epoch in (0.0, 2.25, 3.0):
        summary.note_run(tmp_path, epoch, ranks=2)
    assert summary.read_history(tmp_path / "log.csv").resumed == [2.25, 3.0]
    text = summary.write_summary(tmp_path)
    assert "resumed after 2.25, 3" in rows_of(text)["epochs"]


def test_what_is_missing_is_left_out(tmp_path):
    write(tmp_path, "epoch,loss,val_loss", "0,2.5,NA")
    text = summary.write_summary(tmp_path)
    assert set(rows_of(text)) == {"epochs", "training loss", "files"}
    one = drawn(tmp_path)
    assert one["training"] > 10 and one["validation"] == 0
    write(tmp_path, COLUMNS, row(0))
    summary.write_summary(tmp_path)
    assert drawn(tmp_path)["width"] > 1.5 * one["width"]  # four panels


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    lines = [row(0), row(1, "nan", "inf"), row(2, 0.7, 0.8), row(3, "nan", "NA")]
    write(tmp_path, COLUMNS, *lines)
    rows = rows_of(summary.write_summary(tmp_path))
    assert rows["validation accuracy"].endswith("nan, best 0.8000 in epoch 3")
    only = ",".join(["0", *["nan"] * 8])
    rows = rows_of(summary.write_summary(write(tmp_path, COLUMNS, only)))
    assert set(rows) == {"epochs", "files"}
    assert drawn(tmp_path)["training"] == 0


def test_a_broken_line_is_named_and_left_out(tmp_path):
    write(tmp_path, COLUMNS, row(0), "1,60,0.04", row(2))
    rows = rows_of(summary.write_summary(tmp_path))
    assert rows["not read"].endswith("line 3 of log.csv: 3 of 9 values")
    assert rows["epochs"].endswith("3, 2 of them logged")


def test_a_run_without_an_epoch_has_no_picture(tmp_path):
    rows = rows_of(summary.write_summary(write(tmp_path, COLUMNS)))
    assert rows["epochs"].endswith("none has ended")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("text", [None, "", "epo"])
def test_a_run_that_ended_in_its_first_epoch_has_no_history(text, tmp_path):
    if text is not None:
        (tmp_path / "log.csv").write_text(text)
    rows = rows_of(summary.write_summary(tmp_path, {"top_1": 0.5}))
    assert rows["epochs"].endswith("none has ended")
    assert rows["evaluation"].endswith("top_1 0.5000")
    assert summary.best(tmp_path, "val_top_1") is None


def test_a_log_that_is_none_is_named(tmp_path):
    write(tmp_path, "step,loss", "0,2.5")
    with pytest.raises(ValueError, match="a column 'epoch', got .*log.csv with step, "):
        summary.write_summary(tmp_path)
    write(tmp_path, "")
    with pytest.raises(ValueError, match="with nothing in its first line"):
        summary.write_summary(tmp_path)


def test_the_best_value_so_far(tmp_path):
    assert summary.best(tmp_path, "val_top_1") is None
    write(tmp_path, COLUMNS, row(0, 0.1, 0.4), row(1, 0.2, "nan"))
    assert summary.best(tmp_path, "val_top_1") == 0.4
    assert summary.best(tmp_path, "val_nothing") is None


def test_many_epochs_and_rates_far_apart_are_drawn(tmp_path):
    lines = [row(e).replace(",0.1,", f",{0.1 ** (e // 30)},") for e in range(90)]
    summary.write_summary(write(tmp_path, COLUMNS, *lines), unit="pictures")
    assert drawn(tmp_path)["training"] > 500
    history = summary.read_history(tmp_path / "log.csv")
    assert math.isclose(history.columns["learning_rate"][-1], 0.01)
