"""The parts of the line of progress: what is exposed, how fast, how long, what text."""

import dataclasses
import io
import itertools
import math
import os
import pty
import struct
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pages import run_page
from rich.cells import cell_len

import tfdist
from tfdist.callbacks import Progress, _progress_rate, _progress_text
from tfdist.callbacks._progress_terminal import Display
from tfdist.core.timeline import exposed_communication

# ---- exposed communication ----


def record(name, submitted_us, done_us, code=0):
    return {
        "name": name,
        "submitted_us": submitted_us,
        "done_us": done_us,
        "code": code,
    }


def step(*times, group="train/gradients.0123abcd", repeat=""):
    return [record(f"{group}.{i}{repeat}", *pair) for i, pair in enumerate(times)]


def test_what_overlaps_with_the_backward_pass_is_hidden():
    assert exposed_communication.exposed_us(step((0, 60), (50, 80), (100, 130))) == 30
    assert exposed_communication.exposed_us(step((0, 60), (50, 180), (100, 130))) == 80
    # Back before the last one was handed over: nothing but that one is waited for.
    assert exposed_communication.exposed_us(step((0, 1), (10, 11))) == 1


def test_steps_are_told_apart_by_their_buckets():
    first = step((0, 30), (20, 40))
    second = step((100, 130), (120, 145))
    assert exposed_communication.tails(second + first) == [(20, 40), (120, 145)]
    assert exposed_communication.exposed_us(first + second) == 45
    # In one graph they are numbered, and may come before the one ahead has ended.
    numbered = step((35, 50), (60, 61), repeat="#1")
    assert exposed_communication.tails(first + numbered) == [(20, 40), (60, 61)]


def test_two_lists_at_a_time_are_waited_for_once():
    one = step((0, 100))
    other = step((50, 120), group="train/gradients.89abcdef")
    assert exposed_communication.exposed_us(one + other) == 120
    apart = step((200, 210), group="train/gradients.89abcdef")
    assert exposed_communication.exposed_us(one + apart) == 110
    within = step((20, 60), group="train/gradients.89abcdef")
    assert exposed_communication.exposed_us(one + within) == 100
    names = [name for name, _ in exposed_communication.lists(one + within)]
    assert sorted(names) == ["train/gradients.0123abcd", "train/gradients.89abcdef"]


def test_rows_of_tables_belong_to_their_list():
    rows = [
        record("gradients.0123abcd.rows3.values", 50, 90),
        record("gradients.0123abcd.rows3.indices", 55, 70),
        record("gradients.0123abcd.rows3.values.1", 150, 190),
    ]
    assert exposed_communication.tails(
        step((0, 10), group="gradients.0123abcd") + rows
    ) == [
        (55, 90),
        (150, 190),
    ]


def test_other_operations_and_failed_ones_do_not_count():
    others = ["StopTogether", "batch_norm.3", "gradients.12.0", "allreduce.eager"]
    records = [record(name, 0, 1000) for name in others]
    assert exposed_communication.tails(records) == []
    assert exposed_communication.exposed_us(records) == 0
    assert (
        exposed_communication.exposed_us(
            [record("gradients.0123abcd.0", 0, 9, code=10)]
        )
        == 0
    )
    assert exposed_communication.exposed_us([]) == 0


# ---- speed and time ----


def test_the_window_forgets_what_was_slow_before():
    window = _progress_rate.Window(10.0)
    for _ in range(30):
        window.add(_progress_rate.Totals(1, 1.0, 1.0, 0.5))
    for _ in range(200):
        window.add(_progress_rate.Totals(1, 0.1, 0.1, 0.01))
    assert window.recent.steps_per_s == pytest.approx(10.0)
    assert window.recent.exposed == pytest.approx(0.1)
    assert _progress_rate.Window().recent.steps_per_s is None
    assert _progress_rate.Window().recent.exposed is None


def test_a_long_training_keeps_few_points():
    window = _progress_rate.Window(10.0)
    for _ in range(100_000):
        window.add(_progress_rate.Totals(1, 0.001))
    assert len(window._points) < 60
    assert window.recent.steps_per_s == pytest.approx(1000)


def test_time_left_needs_steps_and_speed():
    left = {"steps": 10, "steps_per_s": 2.0, "epoch_ends": 2, "pauses_s": [2.0, 4.0]}
    assert _progress_rate.seconds_left(**left) == 11.0
    assert _progress_rate.seconds_left(**{**left, "pauses_s": []}) == 5.0
    assert _progress_rate.seconds_left(**{**left, "steps": None}) is None
    assert _progress_rate.seconds_left(**{**left, "steps_per_s": None}) is None
    assert _progress_rate.seconds_left(**{**left, "steps": 0, "epoch_ends": 0}) == 0.0


def test_a_rank_without_data_adds_nothing():
    busy, idle = [100, 2.0, 2.0, 0.5], [0, 0.0, 0.0, 0.0]
    assert _progress_rate.of_all_ranks([busy, idle]) == (50.0, 0.25)
    assert _progress_rate.of_all_ranks([idle, idle]) == (None, None)
    slower = [100, 4.0, 3.0, 0.75]
    assert _progress_rate.of_all_ranks([busy, slower]) == (50.0, 0.25)


# ---- the line ----

FULL = _progress_text.Status(
    epoch=3,
    epochs=90,
    step=120,
    steps=5004,
    metrics={"loss": 2.30259, "accuracy": 0.4511, "top_5": 0.75},
    samples_per_s=1523.0,
    unit="images",
    exposed=0.04,
    left_s=42780.0,
)
CLOSED = _progress_text.Status(
    **{
        **vars(FULL),
        "metrics": {
            **FULL.metrics,
            **{f"val_{k}": v for k, v in FULL.metrics.items()},
        },
        "took_s": 3285.0,
    }
)


@pytest.mark.parametrize(
    "status", [FULL, CLOSED, _progress_text.Status(1), _progress_text.Status(1, 2)]
)
def test_no_line_is_wider_than_the_terminal(status):
    for width in range(1, 200):
        assert len(_progress_text.line(status, width, bar="━─")) <= width


def test_characters_of_two_cells_count_twice():
    status = dataclasses.replace(FULL, unit="画像", metrics={"損失": 1.0})
    for width in range(1, 200):
        assert cell_len(_progress_text.line(status, width, bar="━─")) <= width


def test_everything_that_matters_is_there_at_80_columns():
    line = _progress_text.line(FULL, 79)
    for part in ("epoch 3/90", "loss 2.303", "acc 0.451", "1523/s", "exposed 4%"):
        assert part in line
    assert line.endswith("ETA 11h53m")
    # tfdistrun puts "[rank 0] " in front.
    assert all(
        part in _progress_text.line(FULL, 70)
        for part in ("1523/s", "exposed 4%", "ETA")
    )
    closing = _progress_text.line(CLOSED, 70)
    assert "loss 2.303 val 2.303" in closing and "acc 0.451 val 0.451" in closing


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (FULL, ["top_5", "120/", "exposed", "acc", "/s", "ETA", "2%", "loss", "epoch"]),
        (CLOSED, ["top_5", "ETA", "exposed", "54m", "/s", "acc", "loss", "epoch"]),
    ],
)
def test_parts_go_in_the_order_of_their_worth(status, parts):
    gone = [
        next(w for w in range(1, 200) if part in _progress_text.line(status, w))
        for part in parts
    ]
    assert gone == sorted(gone, reverse=True)


def test_a_file_gets_everything_in_full():
    assert _progress_text.line(FULL) == (
        "epoch 3/90  step 120/5004  loss 2.3026  accuracy 0.4511  top_5 0.7500  "
        "1523 images/s  exposed comm. 4%  ETA 11h53m"
    )
    assert _progress_text.line(CLOSED).startswith(
        "epoch 3/90  120 steps in 54m45s  loss 2.3026  val_loss 2.3026  accuracy 0.4511"
    )


def test_what_is_not_known_is_left_out():
    status = _progress_text.Status
    assert _progress_text.line(status(1, step=7), bar="━─") == "epoch 1  step 7"
    assert _progress_text.line(status(1, 2, 7, note="validation 3")) == (
        "epoch 1/2  validation 3"
    )
    nan = status(1, metrics={"loss": math.nan}, took_s=9)
    assert _progress_text.line(nan, 40) == "epoch 1  0 steps in 9s  loss nan"
    # A validation metric that has no counterpart stands alone.
    alone = status(1, metrics={"val_auc": 0.5}, took_s=9)
    assert _progress_text.line(alone).endswith("9s  val_auc 0.5000")
    late = status(1, took_s=9, slowest=(5, 0.29))
    assert _progress_text.line(late).endswith("9s  others wait 29% for rank 5")


def test_the_bar_fills_with_the_epoch():
    def bar(step):
        status = _progress_text.Status(1, 2, step, 40)
        line = _progress_text.line(status, 79, bar="━─")
        return line.count("━"), line.count("─")

    assert [bar(0), bar(20), bar(40)] == [(0, 24), (12, 12), (24, 0)]
    assert bar(80) == (24, 0)  # more steps than were announced


# ---- where it goes ----


class Terminal:
    """A pseudo terminal of a width, and what stands on it."""

    def __init__(self, columns):
        import fcntl
        import termios

        self._ours, theirs = pty.openpty()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self.file = open(theirs, "w", encoding="utf-8")
        self._text = ""

    def lines(self):
        self.file.write("\0")  # comes last, when all the rest has come
        self.file.flush()
        while not self._text.endswith("\0"):
            self._text += os.read(self._ours, 1 << 16).decode()
        self._text = self._text[:-1]
        shown = []
        for line in self._text.split("\n"):
            cells = ""
            for piece in line.split("\r"):
                cells = piece + cells[len(piece) :]
            shown.append(cells.rstrip())
        return shown

    def close(self):
        self.file.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    made = Terminal(60)
    yield made
    made.close()


def test_on_a_terminal_the_line_is_rewritten_in_place(terminal):
    display = Display(terminal.file)
    assert display.is_terminal and display.width == 59 and display.every_s == 0.25
    assert display.bar == "━─"
    display.show("a long line", 0.0)
    display.show("short", 0.1)
    assert terminal.lines() == ["short"]
    display.finish("the end")
    display.show("next", 1.0)
    assert terminal.lines() == ["the end", "next"]
    display.finish()
    display.finish()
    assert terminal.lines() == ["the end", "next", ""]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_in_a_file_lines_follow_each_other_and_come_less_often(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")  # CI systems set it
    file = io.StringIO()
    display = Display(file)
    assert not display.is_terminal and display.width is None and display.bar == ""
    long = "x" * 500
    due = []
    for now_s in range(100):
        if display.is_due(now_s):
            display.show(f"{now_s} [red]{long}", now_s)
            due.append(now_s)
    assert due == list(range(10, 100, 10))
    display.finish("end")
    display.finish()
    lines = [f"{now_s} [red]{long}" for now_s in due]
    assert file.getvalue().splitlines() == [*lines, "end"]


def test_a_terminal_without_a_width_counts_as_a_file(monkeypatch):
    for columns, kind in ((0, "xterm"), (80, "dumb")):
        monkeypatch.setenv("TERM", kind)
        terminal = Terminal(columns)
        assert not Display(terminal.file).is_terminal
        terminal.close()


def test_what_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    display = Display(io.TextIOWrapper(raw, encoding="ascii"), every_s=0.0)
    display.show("12 échantillons", 0.0)
    display.finish("done")
    assert raw.getvalue() == b"12 ?chantillons\ndone\n"


def test_training_goes_on_when_the_reader_has_gone():
    end, file = os.pipe()
    os.close(end)
    display = Display(open(file, "w"))
    display.show("nobody", 0.0)
    display.finish("reads it")
    full = Display(open("/dev/full", "w"))
    full.show("no space", 0.0)
    full.finish("is left")


# ---- the callback, on one rank ----


@pytest.fixture
def alone():
    tfdist.init()
    keras.utils.clear_session()
    yield
    tfdist.shutdown()


def model_of(**compiled):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", jit_compile=False, **compiled)
    return model


def fit(progress, *, unknown=False, steps_per_execution=1, steps=6, **options):
    model = model_of(steps_per_execution=steps_per_execution)
    x = np.ones((steps * 4, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    if unknown:
        data = data.filter(lambda *_: True)
    return model.fit(data, verbose=0, callbacks=[progress], **options).history


# An unknown number of steps needs executions of one: TensorFlow cannot run half of one.
@pytest.mark.parametrize(
    ("unknown", "steps_per_execution"), [(False, 1), (True, 1), (False, 4)]
)
def test_steps_are_counted(alone, unknown, steps_per_execution):
    shown = io.StringIO()
    progress = Progress(4, file=shown, every_s=1e-9)
    fit(progress, unknown=unknown, steps_per_execution=steps_per_execution, epochs=2)
    first, second = [
        [line.split("  ")[1] for line in lines]
        for _, lines in itertools.groupby(
            shown.getvalue().splitlines(), lambda line: line[:9]
        )
    ]
    # In a file the time until the first line begins with the first step.
    counts = [2, 3, 4, 5, 6] if steps_per_execution == 1 else [6]
    of = "" if unknown else "/6"
    assert first[:-1] == [f"step {n}{of}" for n in counts]
    # From the second epoch on it is known how many there are.
    assert second[:-1] == [f"step {n}/6" for n in counts]
    assert first[-1].startswith("6 steps in ") and second[-1].startswith("6 steps in ")


def test_a_resumed_epoch_counts_on(alone):
    shown = io.StringIO()
    progress = Progress(
        4, file=shown, every_s=1e-9, total_epochs=5, steps_per_epoch=6, first_step=4
    )
    fit(progress, steps=2, initial_epoch=2, epochs=3)
    fit(progress, initial_epoch=3, epochs=5)
    lines = [line.split("  ")[:2] for line in shown.getvalue().splitlines()]
    assert lines[0] == ["epoch 3/5", "step 6/6"]
    assert lines[1][1].startswith("2 steps in")
    assert lines[2] == ["epoch 4/5", "step 2/6"]


@pytest.mark.parametrize("first_step", [0, 4])
def test_progress_omits_steps_before_the_start_of_elastic(alone, first_step):
    shown = io.StringIO()
    x = np.ones((24, 2), "float32")
    data = tfdist.data.global_batches((x, x[:, :1]), global_batch=4)
    given = {"first_step": 4, "steps_per_epoch": 6} if first_step else {}
    progress = Progress(4, file=shown, every_s=1e-9, **given)
    listed = [tfdist.callbacks.Elastic(start=4), progress]
    model_of().fit(data, epochs=2, verbose=0, callbacks=listed)
    lines = [line.split("  ")[1] for line in shown.getvalue().splitlines()]
    assert lines[0] == "step 6/6" and lines[1].startswith("2 steps in")
    assert lines[2] == "step 2/6" and lines[-1].startswith("6 steps in")


def test_one_rank_has_nothing_exposed_and_does_not_speak_of_it(alone):
    shown = io.StringIO()
    history = fit(Progress(4, file=shown), epochs=2)
    assert history["exposed_communication"] == [0.0, 0.0]
    assert "exposed" not in shown.getvalue()
    assert all(speed > 0 for speed in history["samples_per_s"])


def test_an_epoch_of_one_step_has_a_speed_too(alone):
    history = fit(Progress(4, file=io.StringIO()), steps=1, epochs=1)
    assert 0 < history["samples_per_s"][0] < math.inf


def test_standard_output_is_the_default(alone, capsys, monkeypatch):
    fit(Progress(4), epochs=1)
    assert capsys.readouterr().out.startswith("epoch 1/1  6 steps in")


def test_validation_is_shown_while_it_runs(alone, terminal):
    x = np.ones((8, 2), "float32")
    progress = Progress(4, file=terminal.file, every_s=1e-9)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append(terminal.lines()[-1])

    model = model_of()
    model.fit(
        *(x, x[:, :1]),
        batch_size=4,
        epochs=1,
        verbose=0,
        validation_data=(x, x[:, :1]),
        validation_batch_size=4,
        callbacks=[progress, Look()],
    )
    assert [line[:23] for line in seen] == [
        "epoch 1/1  validation 1",
        "epoch 1/1  validation 2",
    ]
    assert " val " in terminal.lines()[-2]
    model.evaluate(x, x[:, :1], verbose=0, callbacks=[progress])
    assert terminal.lines()[-1] == ""  # outside of fit it has nothing to say


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 0}, "Expected global_batch to be a whole number of at least"),
        ({"global_batch": 2.5}, "got 2.5"),
        ({"global_batch": True}, "got True"),
        ({"total_epochs": 0}, "Expected total_epochs"),
        ({"steps_per_epoch": -1}, "Expected steps_per_epoch"),
        ({"first_step": 3}, "Pass both"),
        ({"first_step": 6, "steps_per_epoch": 6}, "below steps_per_epoch"),
        ({"every_s": 0.0}, "Expected every_s above 0 seconds, got 0.0"),
        ({"every_s": math.nan}, "Expected every_s"),
        ({"unit": ""}, "Expected unit"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Progress(**{"global_batch": 8, **arguments})


def test_the_examples_of_the_page_run(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    fitted = model.fit
    monkeypatch.setattr(model, "fit", lambda *a, **k: fitted(*a, **{**k, "epochs": 1}))
    x = np.ones((8, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    run_page(
        "progress.md",
        {
            "tfdist": tfdist,
            "model": model,
            "train": data,
            "validation": data,
            "train_step": lambda: 0.5,
        },
    )
    assert "exposed_communication" in (tmp_path / "training.csv").read_text()
    assert "epoch 2/2  3 steps in" in out.getvalue()


def test_a_loop_without_a_compiled_model(alone):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    shown = io.StringIO()
    progress = Progress(4, file=shown)
    callbacks = keras.callbacks.CallbackList([progress], model=model, epochs=1, steps=2)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for number in range(2):
        callbacks.on_train_batch_begin(number)
        callbacks.on_train_batch_end(number, {"loss": 1.0})
    callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.on_train_end()
    assert shown.getvalue().startswith("epoch 1/1  2 steps in 0s  loss 1.0000")
